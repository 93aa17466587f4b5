"""Generate a synthetic dataset and a tokenizer offline, for `energon-packed demo`, tests and benchmarks.

dataset.py    folder and seed  data.jsonl, its images and videos
clips.py      random values    a video of the dataset
tokenizer.py  strings          folder with a tokenizer, a chat template and image settings
speech.py     folder and seed  data.jsonl of speech-like audio, and its files
videos.py     RGB frames       a video file, with PyAV
"""

from energon_packed.demo.dataset import DemoDataset, write_dataset
from energon_packed.demo.speech import write_speech
from energon_packed.demo.tokenizer import write_tokenizer

__all__ = ["DemoDataset", "write_dataset", "write_speech", "write_tokenizer"]

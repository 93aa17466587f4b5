"""ms-swift and LLaMA-Factory: preparation of records with audio, as their packing does it before the training.

    python peer_audio.py ms_swift|llamafactory FOLDER QUESTION ANSWER PATH ...

Prints a JSON line: CPU seconds and number of tokens by the path of each file. Files that the peer cannot read are
omitted, with the error on stderr. FOLDER has the tokenizer and the processor of a Qwen2-Audio, and config.json.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from contract import without_torchvision_operators

RUNS = 5
without_torchvision_operators()


def ms_swift(folder: str, question: str, answer: str) -> Callable[[str], int]:
    """Return the function that prepares a record: `template.encode`, as in its packing dataset."""
    from swift import get_processor, get_template

    template = get_template(get_processor(folder, model_type="qwen2_audio"), template_type="qwen2_audio")
    template.set_mode("train")

    def prepare(path: str) -> int:
        messages = [{"role": "user", "content": f"<audio>{question}"}, {"role": "assistant", "content": answer}]
        return len(template.encode({"messages": messages, "audios": [path]})["input_ids"])

    return prepare


def llamafactory(folder: str, question: str, answer: str) -> Callable[[str], int]:
    """Return the function that prepares a record: `preprocess_dataset` of its packing."""
    os.environ["DISABLE_VERSION_CHECK"] = "1"  # LLaMA-Factory 0.9.5 refuses this version of Transformers
    import soundfile
    import torchaudio
    from llamafactory.data.processor import PackedSupervisedDatasetProcessor
    from llamafactory.data.template import get_template_and_fix_tokenizer
    from llamafactory.hparams import DataArguments
    from transformers import AutoProcessor

    def load(path: str) -> tuple[torch.Tensor, int]:
        """Read with soundfile: torchaudio 2.11 needs libraries of FFmpeg, which PyPI does not have."""
        samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
        return torch.from_numpy(np.ascontiguousarray(samples.T)), rate

    torchaudio.load = load
    processor = AutoProcessor.from_pretrained(folder)
    processor.audio_sampling_rate = 16_000  # as its loader sets it
    options = DataArguments(template="qwen2_audio", cutoff_len=4096, packing=True, neat_packing=True)
    template = get_template_and_fix_tokenizer(processor.tokenizer, options)
    dataset = PackedSupervisedDatasetProcessor(template, processor.tokenizer, processor, options)

    def prepare(path: str) -> int:
        examples: dict[str, Any] = {f"_{name}": [None] for name in ("system", "tools", "images", "videos")}
        examples["_prompt"] = [[{"role": "user", "content": f"<audio>{question}"}]]
        examples["_response"] = [[{"role": "assistant", "content": answer}]]
        rows = dataset.preprocess_dataset(examples | {"_audios": [[path]]})
        return sum(rows["attention_mask"][0])  # 1 for the tokens of its first sample, 0 for padding

    return prepare


def main(peer: str, folder: str, question: str, answer: str, *paths: str) -> None:
    """Measure."""
    torch.set_num_threads(1)
    prepare = {"ms_swift": ms_swift, "llamafactory": llamafactory}[peer](folder, question, answer)
    found: dict[str, tuple[float, int]] = {}
    for path in paths:
        costs, tokens = [], 0
        try:
            for _ in range(RUNS + 1):  # the first call imports libraries
                start = time.process_time()
                tokens = prepare(path)
                costs.append(time.process_time() - start)
        except Exception as error:
            print(f"{peer} cannot read {path}: {type(error).__name__} {error}"[:500], file=sys.stderr)
            continue
        found[path] = min(costs), tokens
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

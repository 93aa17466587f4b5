"""Images of a model family: image files and settings -> token counts, pixels and positions.

families.py     VisionFamily and the built-in families
processors.py   images of families that are supported through a Transformers processor
processor_videos.py  videos of these families
model_class.py  class of a model, by its config.json: argument names, M-RoPE positions
settings.py     processor folder and settings -> VisionFamily
images.py       image file -> size (from the header) or RGB pixels
video_file.py        video file -> frames and their times (from the packets), or selected RGB frames
video_packets.py     packets of a video -> the frames that they show, and whether a decoder can start at them
video_container.py   header of a video file -> its size, and whether frames may be rotated
media.py        images and .npy files of a conversation -> sizes, pixels, patch positions
positions.py    image tokens and vision inputs of a sample; M-RoPE positions
"""

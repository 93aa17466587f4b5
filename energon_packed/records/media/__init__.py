"""Media of records: fields and text in, references to images, videos and audio files out.

kinds.py: the kinds of media, whose code is one loop. reference.py: MediaReference, the address of the bytes of a file,
and the only code that reads them. video.py, audio.py: a file and its selected frames or samples. fields.py: media that
a record lists, with video_fields.py for the values of video fields; unlisted.py: media in fields that are not read.
file_types.py: formats by the first bytes.
"""

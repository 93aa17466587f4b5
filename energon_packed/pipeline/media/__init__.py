"""Images by reference: `pack --media reference`, and back.

locator.py       media of a record to the same with a Locator, in the write stage
stored.py        stage media: images that are in no file of the input, each once, to `out/media`
materialize.py   a dataset with references to the same dataset with the images in its tars
"""

"""Energon datasets as input: made by `energon prepare`, read by their field_map, split, and Metadataset."""

import io
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from energon_packed import PackOptions, SourceError, pack
from tests.conftest import FLAVORS, Packer
from tests.internals import ShardReader, open_sources
from tests.processes import energon as run_energon
from tests.sources.tars import conversations, picture, write_tar

CAPTIONING = {"image": "jpg", "caption": "txt"}
VQA = {"image": "jpg", "context": "json[question]", "answers": "json[answers]", "answer_weights": "json[weights]"}


def dataset(folder: Path, members: list[tuple[str, Any]], sample_type: str, field_map: dict[str, str]) -> Path:
    """An Energon dataset of one tar, without what only Energon's loader needs."""
    (folder / ".nv-meta").mkdir(parents=True)
    write_tar(folder / "shard-0.tar", members)
    kind = {"__module__": "megatron.energon", "__class__": sample_type}
    write_yaml(folder / ".nv-meta" / "dataset.yaml", {"sample_type": kind, "field_map": field_map})
    write_yaml(folder / ".nv-meta" / "split.yaml", {"split_parts": {"train": ["shard-0.tar"]}, "exclude": []})
    return folder


def write_yaml(path: Path, value: Any) -> None:
    path.write_text(yaml.safe_dump(value))


def read(path: Path, **options: Any) -> list[Any]:
    return conversations(open_sources([path], work_dir=path.parent / "work", **options))


def said(path: Path, **options: Any) -> list[Any]:
    """Turns or text of each conversation."""
    return [c.text if c.text is not None else [m.content for m in c.messages] for c in read(path, **options)]


@pytest.mark.parametrize("kind", ["CaptioningSample", "VQASample"])
def test_datasets_of_energon_prepare_are_packed(tmp_path: Path, tokenizer_dir: Path, kind: str) -> None:
    for shard in range(4):
        members: list[tuple[str, Any]] = []
        for number in range(5):
            key = f"{shard}{number}"
            about = {"question": f"What is {key}?", "answers": ["no", f"It is {key}."], "weights": [0.2, 0.8]}
            members += [(f"{key}.jpg", picture(number)), (f"{key}.json", about), (f"{key}.txt", f"Picture {key}.")]
        write_tar(tmp_path / f"shard-{shard}.tar", members)
    prepare = ["prepare", "--non-interactive", "--split-ratio", "2,1,1", "--num-workers", "1", "--sample-type", kind]
    fields = json.dumps(CAPTIONING if kind == "CaptioningSample" else VQA)
    done = run_energon(*prepare, "--field-map", fields, tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    expected = {"train": 10, "val": 5, "test": 5}
    for split, count in expected.items():
        result = pack(
            tmp_path, output_dir=tmp_path / f"out-{split}", tokenizer=tokenizer_dir, seq_len=512, workers=1,
            source_split=split,
        )  # fmt: skip
        assert (result.manifest.records, result.manifest.images) == (count, count)
        for pack_json in _packs(result.shards):
            for name, prompts, captions in zip(
                pack_json["ids"], pack_json["prompts"], pack_json["captions"], strict=True
            ):
                if kind == "CaptioningSample":
                    assert (prompts, captions) == (["<image>"], [f"Picture {name}."])
                else:
                    assert (prompts, captions) == ([f"<image>What is {name}?"], [f"It is {name}."])


def test_flavors_by_field_map(tmp_path: Path) -> None:
    about = {
        "question": "Which?", "choices": ["cat", "dog"], "correct": 1, "answers": ["dog", "cat", "cat"],
        "sequence": ["One ", "a.jpg", " two ", "b.jpg"], "texts": ["One.", "Two."], "matched": [1, 0],
        "names": ["a.jpg", "b.jpg"], "matrix": [[0.1, 0.9], [0.8, 0.2]],
    }  # fmt: skip
    members = [("0.a.jpg", picture(1)), ("0.b.jpg", picture(2)), ("0.json", about), ("0.txt", "A text.")]
    question = {"image": "a.jpg", "context": "json[question]"}
    letters = "Which?\nA. cat\nB. dog\nAnswer with the option's letter from the given choices directly."
    choice = {**question, "choices": "json[choices]", "correct_choice_idx": "json[correct]"}
    similar = {"images": "json[names]", "texts": "json[texts]"}
    cases: list[tuple[str, dict[str, str], Any, list[int]]] = [
        ("OCRSample", {"image": "a.jpg", "text": "txt"}, ["<image>", "A text."], [1]),
        ("CaptioningSample", {"image": "png,b.jpg", "caption": "txt"}, ["<image>", "A text."], [2]),
        ("VQASample", {**question, "answers": "json[answers]"}, ["<image>Which?", "cat"], [1]),
        ("VQASample", {**question, "answers": "json[choices][1]"}, ["<image>Which?", "dog"], [1]),
        ("MultiChoiceVQASample", choice, [f"<image>{letters}", "B"], [1]),
        ("InterleavedSample", {"sequence": "json[sequence]"}, "One <image> two <image>", [1, 2]),
        ("TextSample", {"text": "txt"}, "A text.", []),
        ("SimilarityInterleavedSample", {**similar, "matched_text_indices": "json[matched]"},
         "<image>One. <image>Two.", [2, 1]),
        ("SimilarityInterleavedSample", {**similar, "similarity_matrix": "json[matrix]"},
         "<image>One. <image>Two.", [2, 1]),
    ]  # fmt: skip
    for number, (kind, field_map, expected, images) in enumerate(cases):
        folder = dataset(tmp_path / str(number), members, kind, field_map)
        (one,) = read(folder)
        assert said(folder) == [expected], kind
        assert [image.data for image in one.images] == [picture(seed) for seed in images], kind


@pytest.mark.parametrize(
    ("kind", "field_map", "message"),
    [
        (
            "CaptioningSample",
            {"image": "png", "caption": "txt"},
            "0 has no png for image; its parts are jpg, json, txt",
        ),
        ("CaptioningSample", {"image": "jpg"}, "the field_map of CaptioningSample has no caption"),
        ("VQASample", {"image": "jpg", "context": "txt", "answers": "json[none]"}, r"has no json\[none\] for answers"),
        ("VQASample", {"image": "jpg", "context": "txt", "answers": "json[empty]"}, "has no answers"),
        (
            "MultiChoiceVQASample",
            {"image": "jpg", "context": "txt", "choices": "json[empty]"},
            "needs 1 to 26 choices",
        ),
        ("InterleavedSample", {"sequence": "txt"}, "sequence is str, not a list"),
    ],
)
def test_a_field_that_is_missing_is_a_reject(
    tmp_path: Path, kind: str, field_map: dict[str, str], message: str
) -> None:
    members = [("0.jpg", picture(1)), ("0.json", {"empty": []}), ("0.txt", "A text.")]
    (source,) = open_sources([dataset(tmp_path / "d", members, kind, field_map)], work_dir=tmp_path)
    (row,) = source.scan(0, source.extent())
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(str(row.reject))


def test_splits_and_exclusions(tmp_path: Path) -> None:
    members = {n: [(f"{n}{k}.jpg", picture(k)) if p else (f"{n}{k}.txt", f"{n}{k}") for k in (0, 1) for p in (1, 0)]
               for n in range(4)}  # fmt: skip
    folder = dataset(tmp_path / "d", members[0], "CaptioningSample", CAPTIONING)
    for n in range(1, 4):
        write_tar(folder / f"shard-{n}.tar", members[n])
    split: dict[str, Any] = {
        "split_parts": {"train": ["shard-{0..2}.tar"], "val": ["shard-3.tar"], "test": []},
        "exclude": ["shard-1.tar", "shard-0.tar/01"],
    }
    write_yaml(folder / ".nv-meta" / "split.yaml", split)
    assert [one.id for one in read(folder)] == ["00", "20", "21"]
    assert [one.id for one in read(folder, split="val")] == ["30", "31"]
    for unknown in ("test", "validation"):
        with pytest.raises(
            SourceError,
            match=f"no packs in split '{unknown}'; it has train, val. Pass one of these as `source_split`, or",
        ):
            read(folder, split=unknown)
    (folder / "shard-2.tar").unlink()
    with pytest.raises(SourceError, match=r"shard-2.tar, one of 1 missing shards of .*split.yaml, does not"):
        read(folder)
    (folder / ".nv-meta" / "split.yaml").write_text("split_parts: 3")
    with pytest.raises(SourceError, match="is not a valid split file"):
        read(folder)


LOADER = """
import __main__
__main__.loader_was_run = True

def sample_loader(raw):
    about = raw["json"]
    return {
        "__key__": f"{raw['__key__']}-asked",
        "image": raw["jpg"],
        "context": f"{about['q']} ({raw['cls']})",
        "answers": tuple(about["a"]),
        "answer_weights": np.array(about["w"]),
    }

def part_filter(part):
    return part in ("jpg", "json", "cls")

import numpy as np
"""


def with_loader(folder: Path, members: list[tuple[str, Any]], code: str, kind: str = "VQASample", **more: Any) -> Path:
    dataset(folder, members, kind, {})
    names = {"sample_loader": "sample_loader.py:sample_loader", "part_filter": "sample_loader.py:part_filter"}
    sample_type = {"__module__": "megatron.energon", "__class__": kind}
    write_yaml(folder / ".nv-meta" / "dataset.yaml", {"sample_type": sample_type, **names, **more})
    (folder / ".nv-meta" / "sample_loader.py").write_text(code)
    return folder


def asked(number: int) -> list[tuple[str, Any]]:
    about = {"q": f"What is {number}?", "a": ["no", f"It is {number}."], "w": [0.2, 0.8]}
    return [(f"{number}.jpg", picture(number)), (f"{number}.json", about), (f"{number}.cls", f"{number}"),
            (f"{number}.mp4", b"not read")]  # fmt: skip


def test_a_sample_loader_is_refused_unless_it_is_trusted(
    tmp_path: Path, tokenizer_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    import __main__

    folder = with_loader(tmp_path / "d", [*asked(0), *asked(1)], LOADER)
    with pytest.raises(
        SourceError, match=r"sample_loader.py defines how this dataset is read, .* Set `trust_sample_loader` to"
    ):
        read(folder)
    assert not hasattr(__main__, "loader_was_run")
    found = read(folder, trust_sample_loader=True)
    assert __main__.loader_was_run
    del __main__.loader_was_run
    assert [one.id for one in found] == ["0-asked", "1-asked"]
    assert [[m.content for m in one.messages] for one in found] == [
        [f"<image>What is {n}? ({n})", f"It is {n}."] for n in (0, 1)
    ]
    assert [[image.data for image in one.images] for one in found] == [[picture(0)], [picture(1)]]
    options: dict[str, Any] = {"tokenizer": tokenizer_dir, "seq_len": 512, "workers": 2, "trust_sample_loader": True}
    first = pack(folder, output_dir=tmp_path / "out", **options).manifest
    assert (first.records, first.packed, first.images) == (2, 2, 2)
    (folder / ".nv-meta" / "sample_loader.py").write_text(LOADER.replace("{about['q']} (", "{about['q']} [x] ("))
    second = pack(folder, output_dir=tmp_path / "other", **options).manifest
    assert second.tokens > first.tokens
    assert second.input_fingerprint != first.input_fingerprint


def test_images_that_a_sample_loader_makes_or_passes_on(tmp_path: Path) -> None:
    code = """
from PIL import Image, ImageOps

def sample_loader(raw):
    return {"sequence": ["Two: ", raw["a.jpg"], ImageOps.mirror(raw["a.jpg"]), raw["txt"]]}

def part_filter(part):
    return True
"""
    members = [("0.a.jpg", picture(1)), ("0.txt", " seen.")]
    folder = with_loader(tmp_path / "d", members, code, "InterleavedSample", part_filter=["a.jpg", "txt"])
    (source,) = open_sources([folder], work_dir=tmp_path, trust_sample_loader=True)
    (row,) = source.scan(0, source.extent())
    assert row.record["text"] == "Two: <image><image> seen."
    whole, mirrored = row.record["images"]
    assert (whole.path, whole.read()) == (str(folder / "shard-0.tar"), picture(1))
    made, given = (np.asarray(Image.open(io.BytesIO(one.read()))) for one in (mirrored, whole))
    assert np.array_equal(made, given[:, ::-1])
    assert mirrored.read().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("raise SystemExit('stop')", r"sample_loader.py cannot be run: SystemExit: stop"),
        ("def (", r"sample_loader.py cannot be run: SyntaxError"),
        ("def part_filter(part): return True", "sample_loader.py has no function sample_loader"),
        ("def sample_loader(raw): return {}", "sample_loader.py has no function part_filter"),
    ],
)
def test_a_sample_loader_that_cannot_be_run(tmp_path: Path, code: str, message: str) -> None:
    folder = with_loader(tmp_path / "d", asked(0), code)
    with pytest.raises(SourceError, match=message):
        read(folder, trust_sample_loader=True)


@pytest.mark.parametrize(
    ("body", "reason", "detail"),
    [
        ("raw['png']", "adapter_failed", "sample_loader.py:sample_loader raised KeyError: 'png'"),
        ("None", "adapter_failed", "returned NoneType, not a dictionary"),
        ("exit()", "adapter_failed", "raised SystemExit"),
        ("skip_sample()", "dropped_by_adapter", "skipped it"),
        ("{'image': raw['jpg'], 'answers': ['a']}", "missing_field", "no context; VQASample needs it"),
        ("{'image': object(), 'context': 'a', 'answers': 'b'}", "adapter_failed", "returned a object; return texts"),
        ("{'image': 'none', 'context': 'a', 'answers': 'b'}", "missing_image", "has no image 'none'"),
    ],
)
def test_a_sample_that_the_loader_cannot_make_is_a_reject(tmp_path: Path, body: str, reason: str, detail: str) -> None:
    code = (
        "from megatron.energon import SkipSample\ndef skip_sample():\n    raise SkipSample()\n"
        f"def sample_loader(raw):\n    return {body}\n"
        "def part_filter(part):\n    return part in ('jpg', 'json')\n"
    )
    folder = with_loader(tmp_path / "d", asked(0), code)
    (source,) = open_sources([folder], work_dir=tmp_path, trust_sample_loader=True)
    (row,) = source.scan(0, source.extent())
    assert row.reject is not None
    assert row.reject.reason.value == reason
    assert detail in row.reject.detail


def test_a_sample_loader_of_energon_prepare_returns_the_samples_of_energon(tmp_path: Path) -> None:
    """The dataset of Energon's own command, its template filled in, and its own loader beside ours."""
    for shard in range(2):
        members = [m for n in (0, 1) for m in asked(2 * shard + n) if not m[0].endswith("mp4")]
        write_tar(tmp_path / f"shard-{shard}.tar", members)
    prepare = ["prepare", "--non-interactive", "--split-ratio", "1,0,0", "--num-workers", "1"]
    done = run_energon(*prepare, "--sample-type", "VQASample", tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    file = tmp_path / ".nv-meta" / "sample_loader.py"
    assert "TODO" in file.read_text()
    file.write_text(LOADER.replace("import __main__\n__main__.loader_was_run = True", ""))
    ours = {one.id: one for one in read(tmp_path, trust_sample_loader=True)}
    import megatron.energon as energon

    loader = energon.get_loader(
        energon.get_train_dataset(
            tmp_path, worker_config=energon.WorkerConfig(rank=0, world_size=1, num_workers=0), batch_size=1,
            shuffle_buffer_size=None, max_samples_per_sequence=None, repeat=False,
        )
    )  # fmt: skip
    theirs = {batch.__key__[0]: batch for batch in loader}
    assert {f"{key.rpartition('/')[2]}" for key in theirs} == set(ours)
    for key, batch in theirs.items():
        turns = [message.content for message in ours[key.rpartition("/")[2]].messages]
        answers, weights = batch.answers[0], batch.answer_weights[0]
        assert turns == [f"<image>{batch.context[0]}", answers[int(np.argmax(weights))]]


RETURNED = {
    "CaptioningSample": "{'image': raw['a.jpg'], 'caption': raw['txt']}",
    "OCRSample": "{'image': raw['a.jpg'], 'text': raw['txt']}",
    "TextSample": "{'text': raw['txt']}",
    "MultiChoiceVQASample": "{'image': raw['b.jpg'], 'context': raw['txt'], 'choices': raw['json']['c'], "
    "'correct_choice_idx': 1}",
    "InterleavedSample": "{'sequence': [raw['txt'], raw['b.jpg'], raw['a.jpg'], 'end']}",
    "SimilarityInterleavedSample": "{'images': [raw['a.jpg'], raw['b.jpg']], 'texts': raw['json']['c'], "
    "'matched_text_indices': [1, 0]}",
}


def test_samples_of_every_flavor_are_those_of_energon(tmp_path: Path) -> None:
    """One dataset of `energon prepare`, read with a sample loader for each flavor by Energon and by us."""
    import megatron.energon as energon

    members = [("0.a.jpg", picture(1)), ("0.b.jpg", picture(2)), ("0.json", {"c": ["cat", "dog"]}), ("0.txt", "Hi.")]
    write_tar(tmp_path / "shard-0.tar", members)
    prepare = ["prepare", "--non-interactive", "--split-ratio", "1,0,0", "--num-workers", "1"]
    done = run_energon(*prepare, "--sample-type", "CrudeWebdataset", tmp_path)
    assert done.returncode == 0, done.stderr + done.stdout
    for kind, returned in RETURNED.items():
        file = tmp_path / ".nv-meta" / f"{kind}.py"
        file.write_text(f"def load(raw):\n    return {returned}\n\ndef parts(part):\n    return True\n")
        names = {"sample_loader": f"{kind}.py:load", "part_filter": f"{kind}.py:parts"}
        sample_type = {"__module__": "megatron.energon", "__class__": kind}
        write_yaml(tmp_path / ".nv-meta" / "dataset.yaml", {"sample_type": sample_type, **names})
        theirs = energon.get_train_dataset(
            tmp_path, worker_config=energon.WorkerConfig(rank=0, world_size=1, num_workers=0), batch_size=None,
            shuffle_buffer_size=None, max_samples_per_sequence=None, repeat=False,
        )  # fmt: skip
        (sample,) = energon.get_loader(theirs)
        (ours,) = read(tmp_path, trust_sample_loader=True)
        content = ours.text if ours.text is not None else "".join(m.content for m in ours.messages)
        texts = [sample.caption] if kind == "CaptioningSample" else []
        texts += [getattr(sample, name) for name in ("text", "context") if hasattr(sample, name)]
        texts += getattr(sample, "choices", []) + getattr(sample, "texts", [])
        seen = [one for one in getattr(sample, "sequence", []) if isinstance(one, str)] + texts
        assert seen, kind
        assert all(text in content for text in seen), kind
        images = [sample.image] if hasattr(sample, "image") else list(getattr(sample, "images", []))
        images += [one for one in getattr(sample, "sequence", []) if not isinstance(one, str)]
        order = [1, 0] if kind == "SimilarityInterleavedSample" else range(len(images))
        assert len(ours.images) == len(images), kind
        for place, image in zip(order, ours.images, strict=True):
            pixels = np.asarray(Image.open(io.BytesIO(image.read()))) / 255.0
            assert np.allclose(images[place].permute(1, 2, 0).numpy(), pixels, atol=1e-6), kind


def test_crude_data_and_code_that_is_not_trusted_go_to_an_adapter(
    tmp_path: Path, tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "crude_adapter.py").write_text(
        "def read(parts):\n"
        "    text = parts['xyz'].decode() + ' ' + parts['json']['more']\n"
        "    return {'id': parts['id'], 'images': [parts['jpg']], 'captions': [text]}\n"
    )
    members = [("0.jpg", picture(1)), ("0.xyz", "A text."), ("0.json", {"more": "And more."})]
    crude = dataset(tmp_path / "crude", members, "", {})
    write_yaml(crude / ".nv-meta" / "dataset.yaml", {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"})
    code = with_loader(tmp_path / "code", members, "raise SystemExit('this was run')\n")
    plain = write_tar(tmp_path / "plain.tar", members)
    for name, path in {"crude": crude, "code": code, "plain": plain}.items():
        result = pack(
            path, output_dir=tmp_path / f"{name}-out", tokenizer=tokenizer_dir, seq_len=512, workers=1,
            adapter="crude_adapter:read",
        )  # fmt: skip
        (found,) = _packs(result.shards)
        assert (found["ids"], found["captions"]) == (["0"], [["A text. And more."]])
        assert result.manifest.images == 1


def test_packs_of_another_packer_need_no_code(tmp_path: Path) -> None:
    value = {"images": [["img0_0.jpg"]], "prompts": [["What?"]], "captions": [["It."]], "sample_count": 1}
    members = [("0.json", value), ("0.img0_0.jpg", picture(1))]
    folder = with_loader(tmp_path / "d", members, "raise SystemExit('this was run')\n", "PackedCaptioningSample")
    assert said(folder) == [["<image>What?", "It."]]


def test_an_unknown_class_is_read_by_its_parts_if_their_names_are_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name, members in {
        "parts": [("0.jpg", picture(1)), ("0.txt", "A text.")],
        "own": [("0.jpg", picture(1)), ("0.xyz", "A text.")],
    }.items():
        folder = dataset(tmp_path / name, members, "", {})
        kind = {"__module__": "my.samples", "__class__": "MySample"}
        write_yaml(folder / ".nv-meta" / "dataset.yaml", {"sample_type": kind, "field_map": {"a": "txt"}})
    with caplog.at_level(logging.WARNING):
        assert said(tmp_path / "parts") == [["<image>", "A text."]]
    assert "names the sample class MySample, code that is not run; its samples are read by" in caplog.text
    with pytest.raises(
        SourceError, match="code that is not run, and the parts of shard-0.tar do not say .* `adapter`"
    ):
        read(tmp_path / "own")
    crude = dataset(tmp_path / "crude", [("0.jpg", picture(1)), ("0.txt", "A text.")], "", {})
    write_yaml(crude / ".nv-meta" / "dataset.yaml", {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"})
    assert said(crude) == [["<image>", "A text."]]


def test_a_metadataset_is_its_members(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b", "c"):
        dataset(tmp_path / name, [("0.txt", f"Text {name}.")], "TextSample", {"text": "txt"})
    blend = [{"path": "b", "weight": 3}, {"path": "more/inner.yaml", "weight": 1}]
    head = {"__module__": "megatron.energon"}
    write_yaml(tmp_path / "m.yaml", {**head, "__class__": "MetadatasetV2", "splits": {"train": {"blend": blend}}})
    inner = {"train": {"datasets": [{"path": "../c", "weight": 1}, {"path": "../a", "split_part": "train"}]}}
    (tmp_path / "more").mkdir()
    write_yaml(tmp_path / "more" / "inner.yaml", {**head, "__class__": "Metadataset", "splits": inner})
    with caplog.at_level(logging.WARNING):
        assert said(tmp_path / "m.yaml") == ["Text b.", "Text c.", "Text a."]
    assert "the weights and repetitions of its datasets are ignored" in caplog.text
    with pytest.raises(SourceError, match=r"has no split 'val'; it has train"):
        read(tmp_path / "m.yaml", split="val")
    split = {"train": {"path": "a", "dataset_config": "crude.yaml"}}
    write_yaml(tmp_path / "s.yaml", {**head, "__class__": "MetadatasetV2", "splits": split})
    with pytest.raises(SourceError, match=r"s.yaml sets 'dataset_config' of .*/a, which selects code or fields"):
        read(tmp_path / "s.yaml")
    write_yaml(tmp_path / "n.yaml", {"other": 1})
    with pytest.raises(SourceError, match="is not a Metadataset"):
        read(tmp_path / "n.yaml")


@pytest.mark.parametrize("flavor", FLAVORS)
def test_repacking_gives_the_same_samples(pack_demo: Packer, tokenizer_dir: Path, tmp_path: Path, flavor: str) -> None:
    first = pack_demo(sample_class=flavor)
    options: dict[str, Any] = {
        "tokenizer": tokenizer_dir,
        "sample_class": flavor,
        "unpacked": flavor == "MultiMixQASample",
        "max_reject_rate": 0.0,
        "workers": 1,
    }
    again = pack(PackOptions(inputs=(str(first.shards.parent),), output_dir=tmp_path / "b", seq_len=2048, **options))
    assert again.manifest.records == first.manifest.packed
    assert again.manifest.packs != first.manifest.packs or flavor == "MultiMixQASample"
    back = pack(PackOptions(inputs=(str(again.shards),), output_dir=tmp_path / "c", seq_len=1024, **options))
    samples = [_samples(result.shards) for result in (first, again, back)]
    assert samples[0] == samples[1] == samples[2]


def _samples(shards: Path) -> Counter[str]:
    """Every sample of a dataset, its images as bytes."""
    found = conversations(open_sources([shards], work_dir=shards / "work"))
    return Counter(repr([(n, getattr(c, n)) for n in c.__dataclass_fields__]) for c in found)


def _packs(shards: Path) -> list[dict[str, Any]]:
    reader = ShardReader(sorted(shards.glob("*.tar")))
    return [json.loads(reader[pack]["json"]) for pack in range(len(reader))]

"""The pages of `energon-packed view` about records before packing, Metadatasets and two datasets."""

import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from energon_packed import TemplateError, pack
from tests.audio import qwen2_audio, write
from tests.audio import signal as sound
from tests.browser import Browser
from tests.inspection.test_view import CLIPPED, CONTRAST, EVIL, SIZE, page, press, send, served, until, viewer_of
from tests.internals import (
    AudioFamily,
    HeaderReader,
    InputOptions,
    Pages,
    RecordsViewer,
    matching_records,
    record_tests,
    records_pages,
    template,
    view_command,
)
from tests.printed import invoke
from tests.storage import Store
from tests.videos import make_video


def turns(question: str, answer: str = "It is it.") -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """70 records: plain ones, other formats, media, a group and rejected records."""
    folder = tmp_path_factory.mktemp("raw")
    Image.new("RGB", (56, 84), (200, 10, 10)).save(folder / "a.png")
    make_video(folder / "a.mp4", width=64, height=48, frames=40, fps=10).rename(folder / "a.MP4")
    write(folder / "a.wav", "wav16", sound(16_000, 16_000), 16_000)
    records: list[Any] = [
        {"id": EVIL, "messages": turns(EVIL)},
        {"id": "caption", "images": ["a.png"], "prompts": ["What?"], "captions": ["Red."]},
        {"id": "missing", "images": ["none.png"], "messages": turns("<image>What?")},
        {"id": "role", "messages": [{"role": EVIL, "content": "x"}]},
        {"id": "pair", "prompt": "Best?", "chosen": "This.", "rejected": "That.", "source": "x"},
        {"id": "video", "videos": ["a.MP4"], "messages": turns("<video>What?")},
        {"id": "audio", "audios": ["a.wav"], "messages": turns("<audio>What?")},
        "no record",
    ]
    records += [{"id": f"plain{n}", "messages": turns(f"What is {n}?")} for n in range(62)]
    (folder / "data.jsonl").write_text("\n\n".join(map(json.dumps, records)))
    return folder / "data.jsonl"


def records_viewer(data: Path, tmp_path: Path, **options: Any) -> RecordsViewer:
    encoder = {} if "tokenizer" in options else {"encoder": HeaderReader()}
    return RecordsViewer(InputOptions(inputs=[str(data)], **encoder, **options), tmp_path / "work")


def test_audio_without_known_samples_has_no_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Families without a formula would call the processor without a clip."""
    (tmp_path / "data.jsonl").write_text(json.dumps({"audios": ["none.wav"], "messages": turns("<audio>What?")}))
    viewer = records_viewer(tmp_path / "data.jsonl", tmp_path, tokenizer=qwen2_audio(tmp_path / "model"))
    asked: list[int] = []
    monkeypatch.setattr(AudioFamily, "run", lambda _, samples, longest=0: asked.append(samples))
    assert "none.wav: No such file" in page(viewer, "/")
    assert asked == []


def articles(text: str) -> list[str]:
    return re.split(r"<article>\n<p><a", text)[1:]


def test_a_tokenizer_that_cannot_be_loaded_ends_the_command(data: Path, tokenizer_dir: Path, tmp_path: Path) -> None:
    damaged = shutil.copytree(tokenizer_dir, tmp_path / "damaged")
    (damaged / "chat_template.jinja").write_text("{% damaged")
    with pytest.raises(TemplateError, match="is not valid Jinja"):
        records_viewer(data, tmp_path, tokenizer=damaged)


def test_a_template_that_runs_out_of_time_is_rendered_once(
    text_tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = shutil.copytree(text_tokenizer_dir, tmp_path / "slow")
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    (slow / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        f"{{% if 'odd' in m.content %}}{endless}{{% endif %}}{{% endfor %}}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    (tmp_path / "data.jsonl").write_text(json.dumps({"messages": turns("odd " * 50_000)}))
    monkeypatch.setattr(template, "RENDER_LIMIT", 0.2)
    sizes, out_of_time = [], template._out_of_time
    monkeypatch.setattr(template, "_out_of_time", lambda size: sizes.append(size) or out_of_time(size))
    text = page(records_viewer(tmp_path / "data.jsonl", tmp_path, tokenizer=slow), "/")
    assert "rejected, not_rendered: the chat template did not finish" in text
    assert len(sizes) == 1


def test_records_show_format_place_media_and_rejects(data: Path, tmp_path: Path) -> None:
    viewer = records_viewer(data, tmp_path)
    first = articles(page(viewer, "/"))
    assert len(first) == 20
    formats = [re.findall(r"line (\d+)</a>, (?:format )?(.*?)(?:<|,)", text)[0] for text in first[:8]]
    assert formats == [("1", "messages"), ("3", "captions"), ("5", "messages"), ("7", "messages"), ("9", "chosen"),
                       ("11", "messages"), ("13", "messages"), ("15", "no known format")]  # fmt: skip
    assert "rejected, missing_image: " in first[2]
    assert "rejected, bad_role: " in first[3]
    assert "rejected, bad_json: " in first[7]
    assert not any("rejected, " in first[index] for index in (0, 1, 4, 5, 6))
    assert 'class="group"' in first[4]
    assert "Fields not used: source" in first[4]
    pair = re.findall(r'href="/record/([^"#]*)"', first[4])[0]
    assert [(sample.id, sample.length) for sample in viewer.samples(pair)] == [("pair", None)] * 2
    for kind, article in (("image", first[1]), ("video", first[5]), ("frame", first[5]), ("audio", first[6])):
        urls = re.findall(rf'src="(/media/{kind}/[^"]*)"', article)
        assert len(urls) == (8 if kind == "frame" else 1)
        response = viewer.respond(urls[0])
        assert response.status == 200
        assert response.is_media
    assert viewer.respond("/media/image/0-99999/0/0").status == 404


def test_records_have_the_rejects_and_lengths_of_pack(data: Path, tokenizer_dir: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = {"tokenizer": tokenizer_dir, "video_max_pixels": 12544}
    # The tokenizer has no audio processor, which ends a run.
    lines = [line for line in data.read_text().splitlines() if "<audio>" not in line]
    data = data.with_name("silent.jsonl")
    data.write_text("\n".join(lines))
    out = tmp_path / "out"
    pack(data, output_dir=out, seq_len=512, workers=1, max_reject_rate=1, **options)
    rows = pq.read_table(out / "lengths.parquet").to_pylist()
    viewer = records_viewer(data, tmp_path, **options)
    shown, url = [], "/"
    while url:
        text = page(viewer, url)
        shown += articles(text)
        more = re.search(r'href="(/\?[^"]*)" rel="next"', text)
        url = more[1].replace("&amp;", "&") if more else ""
    assert len(shown) == 69
    rejected = [re.search("rejected, (.*?):", text) for text in shown]
    lengths = [[int(n) for n in re.findall(r", (\d+) tokens", text)] for text in shown]
    status = {row["row"]: row["status"] for row in rows if row["status"] != "fragment"}
    assert [match and match[1] for match in rejected] == [
        None if status[row] in ("packed", "split") else status[row] for row in range(69)
    ]
    plain = {row["row"]: row["length"] for row in rows if row["status"] == "packed"}
    assert {row: lengths[row][0] for row in plain} == plain
    longest = max(plain.values())
    assert len(articles(page(viewer, f"/?min={longest}&max={longest}"))) == list(plain.values()).count(longest)
    assert "<li>rejected, " not in page(viewer, "/?max=99999")  # their lengths are unknown
    assert 'class="turn supervised"' in shown[0]
    assert "Text of the chat template" in shown[0]


@pytest.mark.parametrize(
    ("query", "count"),
    [("text=What+is+5", 11), ("text=absent", 0), ("status=rejected", 3), ("status=bad_role", 1), ("media=video", 1),
     ("status=usable&media=image", 1), ("source=0&percent=100", 0)],
)  # fmt: skip
def test_records_are_found(data: Path, tmp_path: Path, query: str, count: int) -> None:
    viewer = records_viewer(data, tmp_path)
    assert len(articles(page(viewer, f"/?{query}"))) == count
    assert viewer.respond("/?source=1").status == 404
    assert page(viewer, "/?percent=999") == page(viewer, "/?percent=100")


def test_a_search_continues_after_its_time(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    viewer = records_viewer(data, tmp_path)
    monkeypatch.setattr(records_pages, "_SECONDS", 0.0)
    found, url = [], "/?text=What+is+61"
    while url:
        text = page(viewer, url)
        found.append(len(articles(text)))
        more = re.search(r'href="(/\?[^"]*)" rel="next"', text)
        url = more[1].replace("&amp;", "&") if more else ""
    assert found == [0, 0, 0, 1]


def test_records_of_the_next_file_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"text": f"{name}{n}"}) + "\n" for n in range(3)))
    inputs = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    viewer = RecordsViewer(InputOptions(inputs=inputs, encoder=HeaderReader()), tmp_path / "work")
    first = page(viewer, "/?text=1")
    [more] = re.findall(r'href="(/\?[^"]*)" rel="next"', first)
    second = page(viewer, html.unescape(more))
    assert [len(articles(text)) for text in (first, second)] == [1, 1]
    assert ("a1" in first, "b1" in second, 'rel="next"' in second) == (True, True, False)
    monkeypatch.setattr(records_pages, "_COUNTED", 20)
    assert f"{inputs[0]} line 2</a>" in page(viewer, "/?text=1")
    assert f"{inputs[0]} at byte 30</a>" in page(viewer, "/?text=a2")


def test_a_record_is_shown_whatever_it_contains(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(300):  # more than orjson writes
        deep = [deep]
    rows = [{"text": "x" * 30_000}, {"text": "hi", "deep": deep}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    long, nested = articles(page(records_viewer(tmp_path / "data.jsonl", tmp_path), "/"))
    assert " ... 10,016 more characters</pre>" in long
    assert f"&#39;deep&#39;: {'[' * 300}1]" in nested
    turns_of_image = turns("<image>What?")
    pq.write_table(pa.table({"images": [[{"bytes": b"x"}]], "messages": [turns_of_image]}), tmp_path / "data.parquet")
    assert "&#34;bytes&#34;: &#34;1 bytes&#34;" in page(records_viewer(tmp_path / "data.parquet", tmp_path), "/")


def test_records_of_tables(tmp_path: Path) -> None:
    rows = [{"id": str(n), "messages": turns(f"What is {n}?")} for n in range(50)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "data.parquet")
    viewer = records_viewer(tmp_path / "data.parquet", tmp_path)
    text = page(viewer, "/?from=20")
    assert "data.parquet row 20" in text
    assert '<progress max="50" value="40">' in text
    assert "What is 7?" in page(viewer, "/record/0-7")
    response = viewer.respond("/record/0-50")
    assert (response.status, response.content) == (404, b"error: the address must be an index below 50, got '50'\n")
    link = re.findall(r'href="(/record/0-7)#sample-0"', page(viewer, "/"))  # the page has the sample of the link
    assert 'id="sample-0"' in page(viewer, link[0])


def test_tokens_of_records_are_those_of_packs(data: Path, tokenizer_dir: Path, tmp_path: Path) -> None:
    lines = [line for line in data.read_text().split("\n\n") if "audio" not in line]
    source = data.with_name("tokens.jsonl")
    source.write_text("\n".join(lines))
    options: dict[str, Any] = {"tokenizer": tokenizer_dir, "video_max_pixels": 12544}
    pack(source, output_dir=tmp_path / "out", seq_len=512, workers=1, max_reject_rate=1, **options)
    packs, viewer = viewer_of(tmp_path / "out"), records_viewer(source, tmp_path, **options)
    titles = re.compile(r'class="supervised" title="|title="token \d+, (id \d+, label -?\d+)')
    rows, *_ = matching_records(tmp_path / "out" / "lengths.parquet", record_tests(), start=0, limit=1000)
    links = {}
    for article in articles(page(viewer, "/")):
        place = re.findall(r"line (\d+)<", article)[0]
        links[place] = re.findall(r'href="(/tokens/0-\d+/\d)"', article)
    assert [len(links[str(n)]) for n in range(1, 7)] == [1, 1, 0, 0, 2, 1]
    for line, name, sample in (("2", "caption", 0), ("5", "pair", 1), ("6", "video", 0), ("8", "plain0", 0)):
        found = [row for row in rows if row.id.startswith(name)][sample]
        text, packed = page(viewer, links[line][sample]), page(packs, f"/tokens/{found.pack}/{found.sample}")
        assert titles.findall(text) == titles.findall(packed) != []
        assert text.count('data-item class="supervised"') == packed.count('data-item class="supervised"') > 0
        assert f"tokens.jsonl line {line}</a>" in text
        assert page(viewer, re.findall(r'of <a href="(.*?)"', text)[0])
    for path in ("/tokens/0-0/1", "/tokens/0-1/0", "/tokens/x/0", "/tokens/1-0/0"):
        assert viewer.respond(path).status == 404
    missing = re.findall(r'href="/record/0-(\d+)"', articles(page(viewer, "/"))[2])[0]
    assert b"sample 0 is rejected: missing_image" in viewer.respond(f"/tokens/0-{missing}/0").content
    response = records_viewer(source, tmp_path).respond("/tokens/0-0/0")
    assert (response.status, response.content) == (500, b"error: tokens need --tokenizer\n")
    assert "/tokens/" not in page(records_viewer(source, tmp_path), "/")


@pytest.mark.parametrize("kind", ["lines", "array", "table"])
def test_a_line_or_row_to_start_at(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"id": str(n), "messages": turns(f"What is {n}?")} for n in range(50)]
    file = tmp_path / {"lines": "data.jsonl", "array": "data.json", "table": "data.parquet"}[kind]
    if kind == "table":
        pq.write_table(pa.Table.from_pylist(rows), file)
    else:
        file.write_text(json.dumps(rows) if kind == "array" else "\n\n".join(map(json.dumps, rows)))
    viewer = records_viewer(file, tmp_path)
    # Lines are counted from 1, blank lines included, and rows from 0.
    for number in (1, 20, 21):
        place = f"line {number | 1}" if kind == "lines" else f"row {number}"
        shown = articles(page(viewer, f"/?line={number}"))
        assert f" {place}</a>" in shown[0]
        assert f"What is {number // 2 if kind == 'lines' else number}?" in shown[0]
    more = re.findall(r'href="(/\?[^"]*)" rel="next"', page(viewer, "/?line=20"))[0].replace("&amp;", "&")
    assert f"What is {30 if kind == 'lines' else 40}?" in articles(page(viewer, more))[0]
    assert articles(page(viewer, "/?line=9999")) == []
    monkeypatch.setattr(records_pages, "_SECONDS", 0.0)
    response = viewer.respond("/?line=20")
    assert response.status == (200 if kind == "table" else 404)
    assert kind == "table" or b"line 20 must be reached in 0 s" in response.content


def test_media_of_records_are_images_in_their_folder(tmp_path: Path) -> None:
    folder, name = tmp_path / "data", '"><script>.png'
    folder.mkdir()
    for path in (tmp_path / "secret.png", folder / name):
        Image.new("RGB", (8, 8)).save(path)
    (folder / "drawing.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>")
    images = ["../secret.png", str(tmp_path / "secret.png"), "drawing.svg", name]
    lines = [json.dumps({"images": [image], "messages": turns("<image>What?")}) for image in images]
    (folder / "data.jsonl").write_text("\n".join(lines))
    before = sorted(folder.rglob("*"))
    viewer = records_viewer(folder / "data.jsonl", tmp_path)
    shown = articles(page(viewer, "/"))
    assert ["rejected, " in text for text in shown] == [True, True, True, False]
    assert [text.count("<img") for text in shown] == [0, 0, 0, 1]
    assert "<script" not in "".join(shown)
    places = [re.findall(r'href="/record/0-(\d+)"', text)[0] for text in shown]
    found = [viewer.respond(f"/media/image/0-{place}/0/0") for place in places]
    assert [response.status for response in found] == [404, 404, 404, 200]
    assert found[3].kind == "image/png"
    assert sorted(folder.rglob("*")) == before


def test_records_are_found_in_the_row_groups_from_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row groups before the start are not read, and columns of places only where a row matches."""
    rows = 1000
    table = pa.table({name: pa.array([str(n) for n in range(rows)]) for name in ("source", "id", "pack", "shard")})
    numbers = {name: pa.array(np.arange(rows)) for name in ("row", "line", "length", "sample")}
    for name, column in (numbers | {"status": pa.array(["packed"] * rows)}).items():
        table = table.append_column(name, column)
    pq.write_table(table, tmp_path / "lengths.parquet", row_group_size=100)
    read: list[tuple[int, tuple[str, ...]]] = []
    whole = pq.ParquetFile.iter_batches

    def counted(file: Any, *sizes: Any, row_groups: list[int], columns: list[str]) -> Any:
        read.append((row_groups[0], tuple(columns)))
        return whole(file, *sizes, row_groups=row_groups, columns=columns)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", counted)
    found, start, total = matching_records(
        tmp_path / "lengths.parquet", record_tests(file="95", line=957), start=700, limit=5
    )
    assert ([record.id for record in found], start, total) == (["957"], None, rows)
    assert {group for group, _ in read} == {7, 8, 9}
    assert {columns for group, columns in read if len(columns) < 5} == {("source", "line", "row")}


@pytest.fixture(scope="module")
def outputs(text_tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two datasets, a and b, and mix.yaml with the weights 2 and 1."""
    folder = tmp_path_factory.mktemp("several")
    for name, count in (("a", 30), ("b", 20)):
        lines = [json.dumps({"id": f"{EVIL}{name}{n}", "text": f"What is {name}{n}?"}) for n in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        pack(folder / f"{name}.jsonl", output_dir=folder / name, tokenizer=text_tokenizer_dir, seq_len=64, workers=1)
    invoke("metadataset", "-o", folder / "mix.yaml", f"{folder / 'a'}=2", f"{folder / 'b'}=1")
    return folder


def pages_of(*names: object, **values: Any) -> Pages:
    return view_command._pages(tuple(map(str, names)), values, Path("unused"))


def test_a_blend_lists_and_opens_its_datasets(outputs: Path) -> None:
    viewer = pages_of(outputs / "mix.yaml")
    text = page(viewer, "/")
    assert re.findall(r'href="(/\d/)" data-item>.*?/(\w)/webdataset<', text) == [("/0/", "a"), ("/1/", "b")]
    assert "66.67%" in text
    assert '"/1/pack/b_00000000"' in page(viewer, "/1/")
    for path in ("/1/", "/1/pack/b_00000000", "/1/records?id=b1", "/1/text?text=What", "/1/rejects"):
        links = set(re.findall(r'href="(/[^"]*)"', page(viewer, path))) - {"/", "/style.css"}
        assert links
        assert all(link.startswith("/1/") for link in links)
    assert page(viewer, "/1/records?id=b11").count("<tr><td") == 1
    assert viewer.respond("/1/pack/b%3F%2F").content == b"error: no pack has the key 'b?/'\n"
    for path in ("/2/", "/x", "/0/none", "/media/image/x/0/0", "/1/pack/a_00000000"):
        assert viewer.respond(path).status == 404


def test_two_datasets_are_compared(outputs: Path) -> None:
    viewer = pages_of(outputs / "a", outputs / "b")
    text = page(viewer, "/")
    assert re.search(r"records</span></td>.*?30.*?20.*?-10 \(-33.33%\)", text, re.DOTALL)
    assert '"/1/pack/b_00000000"' in page(viewer, "/1/")


def test_wrong_inputs_are_one_line(outputs: Path, tmp_path: Path) -> None:
    three = invoke("view", outputs / "a", outputs / "b", outputs / "a", "--no-browser")
    assert "Pass one dataset" in three.output
    for other in (outputs / "mix.yaml", outputs / "a.jsonl"):
        assert "Pass one dataset" in invoke("view", outputs / "a", other, "--no-browser", "--port", 1).output
    option = invoke("view", outputs / "a", "--image-root", tmp_path, "--no-browser")
    assert "--image-root is an option for records" in option.output
    assert "Missing argument" in invoke("view", "--no-browser").output
    (tmp_path / "energon" / ".nv-meta").mkdir(parents=True)
    assert invoke("view", tmp_path / "energon", "--no-browser").exit_code != 0


def test_a_dataset_and_records_in_an_object_store(outputs: Path, store: Store, tmp_path: Path) -> None:
    url = store.put_folder("view", outputs / "a")
    viewer = pages_of(url)
    with store.counted() as traffic:
        assert "/pack/a_00000000" in page(viewer, "/")
        assert f"{html.escape(EVIL)[:8]}" in page(viewer, "/pack/a_00000001")
        assert "a29" in page(viewer, "/records?id=a29")
        assert "a29" in page(viewer, "/text?text=a29")
        assert page(viewer, "/rejects")
        assert viewer.respond("/pack/b_00000000").status == 404
    tar = max(traffic.bytes_of, key=traffic.bytes_of.__getitem__)
    assert traffic.count("PUT") == traffic.count("DELETE") == 0, tar
    assert not [request for request in traffic.requests[:20] if request.endswith("index.sqlite")]
    records = RecordsViewer(
        InputOptions(inputs=[store.put("raw.jsonl", (outputs / "a.jsonl").read_bytes())], encoder=HeaderReader()),
        tmp_path,
    )
    assert "What is a7?" in page(records, "/")


@pytest.mark.parametrize("what", ["records", "blend", "two"])
def test_pages_of_inputs_in_a_browser(what: str, data: Path, outputs: Path, tmp_path: Path) -> None:
    if what == "records":
        viewer: Pages = records_viewer(data, tmp_path)
    else:
        viewer = pages_of(outputs / "mix.yaml") if what == "blend" else pages_of(outputs / "a", outputs / "b")
    with served(viewer) as server, Browser(tmp_path) as browser:
        for scheme in ("light", "dark"):
            browser.show(360, scheme=scheme)
            browser.open(server.url)
            assert browser.run(CLIPPED) == [0]
            assert browser.run(CONTRAST) >= 4.5
            assert browser.run("[...document.querySelectorAll('input, select')].every((e) => e.labels.length)")
            assert not browser.log
        if what == "records":
            assert browser.run(
                f"Promise.all([...document.querySelectorAll('img[alt^=\"image 0\"]')].map({SIZE}))"
            ) == [56]
            assert "records of" in browser.run("document.title")  # markup of the records did not run


@pytest.mark.parametrize("what", ["records", "blend", "two"])
def test_keys_on_pages_of_inputs(what: str, data: Path, outputs: Path, tmp_path: Path) -> None:
    names = [outputs / "mix.yaml"] if what == "blend" else [outputs / "a", outputs / "b"]
    viewer = records_viewer(data, tmp_path) if what == "records" else pages_of(*names)
    with served(viewer) as server, Browser(tmp_path) as browser:
        browser.open(server.url)
        first, second, back = (press(browser, key) for key in "jjk")
        assert first == back != second
        parts = ("line 1", "line 3") if what == "records" else ("/a/webdataset", "/b/webdataset")
        assert all(shown.endswith(part) for shown, part in zip((first, second), parts, strict=True))
        press(browser, "?")
        assert browser.run("document.querySelector('#keys').open")
        browser.run("document.querySelector('#keys').close()")
        press(browser, "/")
        assert (browser.run("document.activeElement.name") == "text") is (what == "records")
        browser.run("document.activeElement.blur()")
        press(browser, "j")
        browser.run("document.activeElement.click()")
        until(browser, "location.pathname !== '/'")
        assert browser.run("location.pathname") == ("/record/0-0" if what == "records" else "/0/")
        if what == "records":
            browser.open(server.url.partition("?")[0])
            send(browser, "n")
            until(browser, "location.search.includes('from=')")
        assert not browser.log

"""The pages of `energon-packed view`: what they show, what the server refuses, and that they work in Chromium."""

import json
import os
import re
import shutil
import signal
import socket
import sqlite3
import struct
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from energon_packed import ChatEncoder, pack
from tests.audio import qwen2_audio, write
from tests.audio import signal as sound
from tests.browser import Browser
from tests.inspection.datasets import copied_output
from tests.internals import (
    PackedFolder,
    Pages,
    Viewer,
    ViewServer,
    make_nv_meta,
    matching_records,
    packs_pages,
    pages,
    record_tests,
    report_data,
    run_reports,
    view_command,
)
from tests.printed import invoke
from tests.shards.test_repair import llava_pack, write_tar
from tests.videos import make_video

EVIL = "<script>document.title='run'</script><img src=x onerror=\"document.title='run'\"></p></article>\u202e"
KEY = "out_00000000"
SIZE = "(image) => image.decode().then(() => image.naturalWidth)"
CLIPPED = """(() => [document.documentElement.scrollWidth - innerWidth,
  ...[...document.querySelectorAll("main *, nav *, form *")].filter((e) => !e.closest("svg *, thead, dialog") &&
    e.getBoundingClientRect().right > innerWidth + 1).map((e) => e.outerHTML.slice(0, 200))])()"""

# The lowest contrast of a text with the background of the element around it that has one.
CONTRAST = """(() => {
  const linear = (v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = (color) => color.match(/[\\d.]+/g).slice(0, 3).map((v) => linear(v / 255)).reduce(
    (sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const clear = "rgba(0, 0, 0, 0)", back = (e) => {
    while (getComputedStyle(e).backgroundColor === clear) e = e.parentElement;
    return getComputedStyle(e).backgroundColor;
  };
  return Math.min(...[...document.querySelectorAll("main *, nav a")].filter((e) => e.innerText?.trim()).map((e) => {
    const [a, b] = [light(getComputedStyle(e).color), light(back(e))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  }));
})()"""


@pytest.fixture(scope="module")
def out(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of 30 packs or more, with markup wherever a record can have it, pictures and rejected records."""
    folder = tmp_path_factory.mktemp("view")
    records: list[Any] = []
    for number in range(90):
        turns = [
            {"role": "user", "content": f"{EVIL} What is {number}?"},
            {"role": "assistant", "content": "It is it."},
        ]
        records.append({"id": f"{EVIL}{number}", "messages": turns})
    for name, size in (("a.png", (56, 84)), ("b.tif", (84, 56)), ("c.jpg", (60, 60))):
        Image.new("RGB", size, (200, 10, 10)).save(folder / name)
        turns = [{"role": "user", "content": "<image>What?"}, {"role": "assistant", "content": "Red."}]
        records.append({"id": name, "images": [name], "messages": turns})
    records += [{"id": f"{EVIL}bad{n}", "messages": [{"role": EVIL, "content": "x"}]} for n in range(60)]
    (folder / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    options: dict[str, Any] = {"seq_len": 256, "workers": 1, "max_reject_rate": 1}
    pack(folder / "data.jsonl", output_dir=folder / "out", tokenizer=tokenizer_dir, **options)
    return folder / "out"


def viewer_of(out: Path) -> Viewer:
    viewer = Viewer(folder := PackedFolder.open(out), partial(folder.encoder_or_reason, None))
    viewer.respond("/")  # without the tokenizer, which the page after it loads
    return viewer


@contextmanager
def served(viewer: Pages, *, token: bool = True) -> Iterator[ViewServer]:
    with ViewServer(viewer, token=token) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(scope="module")
def server(out: Path) -> Iterator[ViewServer]:
    with served(viewer_of(out)) as server:
        yield server


def ask(server: ViewServer, path: str, method: str = "GET", **headers: str) -> tuple[HTTPResponse, bytes]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.putrequest(method, path, skip_host="Host" in headers)
    cookie = {"Cookie": f"a=b; energon-packed-{server.server_port}={server.token}"}
    for name, value in (cookie | headers).items():
        connection.putheader(name, value)
    connection.endheaders()
    response = connection.getresponse()
    content = response.read()
    connection.close()
    return response, content


def answer(server: ViewServer, request: str) -> bytes:
    """All bytes that are sent until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as connection:
        connection.sendall(request.replace("\n", "\r\n").encode())
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def page(viewer: Pages, path: str) -> str:
    response = viewer.respond(path)
    assert response.status == 200, response.content
    return response.content.decode()


def key_with(viewer: Viewer, ident: str) -> tuple[str, int]:
    found, *_ = matching_records(
        viewer._folder.path.parent / "lengths.parquet", record_tests(ident=ident), start=0, limit=1
    )
    assert found[0].pack is not None
    assert found[0].sample is not None
    return found[0].pack, found[0].sample


def test_browse_filter_and_find_in_a_browser(server: ViewServer, tmp_path: Path) -> None:
    site = server.url.partition("?")[0]
    with Browser(tmp_path) as browser:
        browser.open(server.url)
        assert browser.run("location.search") == ""  # the token is in a cookie
        assert browser.run("document.querySelectorAll('.row svg').length") == 20
        browser.open(site + "?page=2")
        assert browser.run("document.querySelector('.row a').textContent") == "out_00000020"
        assert not browser.log

        key, sample = key_with(server.viewer, "a.png")
        browser.open(f"{site}pack/{key}#sample-{sample}")
        assert "a.png" in browser.run("document.querySelector(':target').innerText")
        assert browser.run(f"Promise.all([...document.querySelectorAll(':target img')].map({SIZE}))") == [56]
        assert "56 x 84, 6 tokens" in browser.run("document.querySelector(':target').innerText")
        assert not browser.log

        browser.open(site + "records?status=bad_role&id=bad7")
        assert browser.run("document.querySelectorAll('tbody tr').length") == 1
        browser.open(site + "records?media=image&min=10&max=4000")
        assert browser.run("[...document.querySelectorAll('td[data-label=id]')].map((cell) => cell.innerText)") == [
            "a.png", "b.tif", "c.jpg",
        ]  # fmt: skip
        browser.open(site + "text?text=" + quote("What is 55?"))
        assert browser.run("document.querySelectorAll('tbody tr').length") == 1
        assert browser.run("document.querySelector('td a').innerText").startswith(f"{EVIL[:-1]}\\u202e55")
        browser.open(site + "rejects?reason=bad_role&from=50")
        assert browser.run("document.querySelectorAll('tbody tr').length") == 10
        assert "line 144" in browser.run("document.querySelector('tbody tr').innerText")
        assert not browser.log
        assert "rejected records" in browser.run("document.title")  # markup of the records did not run


def until(browser: Browser, condition: str) -> None:
    """Wait until an expression of JavaScript is true."""
    for _ in range(600):
        with suppress(AssertionError):  # between two pages
            if browser.run(condition):
                return
        time.sleep(0.05)
    raise AssertionError(condition)


def send(browser: Browser, key: str) -> None:
    for kind in ("keyDown", "keyUp"):
        browser.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, text=key if kind == "keyDown" else "")


def press(browser: Browser, key: str) -> str:
    """Press a key, and return the text of the element that has the focus then, whose outline is visible."""
    send(browser, key)
    outline = browser.run("getComputedStyle(document.activeElement).outline")
    assert browser.run("document.activeElement === document.body") or "solid 2px" in outline, outline
    return str(browser.run("document.activeElement.innerText ?? ''"))


def test_keys(server: ViewServer, tmp_path: Path) -> None:
    with Browser(tmp_path) as browser:
        browser.open(server.url)
        assert [press(browser, key) for key in "jjk"] == [f"out_0000000{number}" for number in (0, 1, 0)]
        press(browser, "?")
        assert browser.run("document.querySelector('#keys').open")
        browser.run("document.querySelector('#keys').close()")
        press(browser, "/")
        assert browser.run("document.activeElement.name") == "text"
        press(browser, "j")
        assert browser.run("document.activeElement.value") == "j"  # a letter in a field is text
        browser.open(server.url.partition("?")[0] + f"tokens/{KEY}/0")
        press(browser, "j")
        assert browser.run("document.querySelector('#detail').textContent").startswith("token 0, id ")
        assert not browser.log


@pytest.mark.parametrize("path", ["", f"pack/{KEY}", f"tokens/{KEY}/0", "records", "rejects", "text?text=What"])
def test_narrow_and_dark(server: ViewServer, path: str, tmp_path: Path) -> None:
    with Browser(tmp_path) as browser:
        browser.open(server.url)
        url = server.url.partition("?")[0] + path + ("&" if "?" in path else "?")
        for number, (scheme, background) in enumerate((("light", "255, 255, 255"), ("dark", "15, 19, 24"))):
            browser.show(360, scheme=scheme)
            browser.open(f"{url}page={number}#sample-0")  # the sample of a link has another background
            assert browser.run(CLIPPED) == [0]
            assert browser.run("getComputedStyle(document.body).backgroundColor") == f"rgb({background})"
            assert browser.run(CONTRAST) >= 4.5
            assert browser.run("[...document.querySelectorAll('input, select')].every((e) => e.labels.length)")
            assert not browser.log


def test_tokens_have_ids_labels_and_values(server: ViewServer, encoder: ChatEncoder) -> None:
    key, sample = key_with(server.viewer, "c.jpg")
    text = page(server.viewer, f"/tokens/{key}/{sample}")
    shown = invoke("inspect", server.viewer._folder.path, "--pack", key, "--tokens", "--json")
    rows = [row for line in shown.output.splitlines() if (row := json.loads(line))["segment"] == sample]
    assert text.count("data-item") == len(rows)
    for row in rows:
        assert f'title="token {row["index"]}, id {row["token"]}, label {row["label"]}, position ' in text
    assert text.count('data-item class="supervised"') == sum(row["label"] >= 0 for row in rows) > 0


def test_long_samples_have_pages_of_tokens(text_tokenizer_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps({"id": "long", "text": "0 1 2 3 " * 300}))
    pack(tmp_path / "data.jsonl", output_dir=tmp_path / "out", tokenizer=text_tokenizer_dir, seq_len=8192, workers=1)
    viewer = viewer_of(tmp_path / "out")
    first, second = (page(viewer, f"/tokens/{KEY}/0?page={number}") for number in (1, 2))
    assert [page(viewer, f"/tokens/{KEY}/0?page={number}") for number in (0, 99)] == [first, second]
    assert first.count("data-item") == 1000
    assert 'id="token-999"' in first
    assert 'id="token-999"' not in second
    assert 'id="token-1000"' in second


@pytest.mark.parametrize(
    ("headers", "part"),
    [
        ({"Host": "evil.example"}, "Host"),
        ({"Host": "127.0.0.1.evil.example:80"}, "Host"),
        ({"Host": "[127.0.0.1"}, "Host"),
        ({"Origin": "http://evil.example"}, "Origin"),
        ({"Origin": "null"}, "Origin"),
        ({"Cookie": ""}, "token"),
        ({"Cookie": "energon-packed-1=x"}, "token"),
        ({"Cookie": "energon-packed-PORT=x"}, "token"),
        ({"Cookie": "energon-packed-1=TOKEN"}, "token"),  # of another port
    ],
)
def test_foreign_requests_are_refused(server: ViewServer, headers: dict[str, str], part: str) -> None:
    values = {"PORT": str(server.server_port), "TOKEN": server.token}
    headers = {name: re.sub("PORT|TOKEN", lambda key: values[key[0]], value) for name, value in headers.items()}
    for path in ("/", "/page.js", f"/media/image/{KEY}/0/0"):
        response, content = ask(server, path, **headers)
        assert response.status == 403
        assert content.startswith(b"error: ")
        assert content.count(b"\n") == 1
        assert part in content.decode()
    assert ask(server, "/", Host="localhost:1234")[0].status == 200  # a tunnel with another port


def test_the_token_of_the_address_becomes_a_cookie(server: ViewServer) -> None:
    for path, local in (("//evil.example/", "/evil.example/"), ("http://evil.example/", "/http://evil.example/")):
        response, _ = ask(server, f"{path}?a=b&token={server.token}", Cookie="", Host="localhost")
        assert (response.status, response.headers["Location"]) == (303, f"{local}?a=b")
    assert "HttpOnly; SameSite=Lax" in response.headers["Set-Cookie"]
    assert ask(server, "/?token=wrong", Cookie="")[0].status == 403


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE"])
def test_only_get_and_head_are_answered(server: ViewServer, method: str) -> None:
    response, content = ask(server, "/", method)
    assert response.status == 501
    assert content.count(b"\n") == (1 if content else 0)
    inner = "GET / HTTP/1.1\nHost: localhost\nConnection: close\n\n"  # a body is not another request
    assert answer(server, f"{method} / HTTP/1.1\nContent-Length: {len(inner)}\n\n{inner}").count(b"HTTP/1.1 ") == 1


def test_head_has_no_content(server: ViewServer) -> None:
    head, _, content = answer(server, "HEAD / HTTP/1.1\nHost: x\nConnection: close\n\n").partition(b"\r\n\r\n")
    assert re.search(rb"Content-Length: [1-9]", head)
    assert content == b""


def test_a_browser_that_leaves_prints_nothing(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with ViewServer(viewer_of(out)) as server:
        client = socket.create_connection(("127.0.0.1", server.server_port))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.close()  # with a reset
        server.process_request_thread(*server.get_request())
    assert capsys.readouterr().err == ""


def test_answers_cannot_run_scripts(server: ViewServer) -> None:
    key, sample = key_with(server.viewer, "a.png")
    for path in ("/", f"/pack/{key}", "/style.css", f"/media/image/{key}/{sample}/0", "/none"):
        response, content = ask(server, path)
        policy = response.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert ("sandbox" in policy) == path.startswith("/media")
        assert response.headers["X-Content-Type-Options"] == "nosniff"
        assert response.headers["Cross-Origin-Resource-Policy"] == "same-origin"
        assert response.headers["Referrer-Policy"] == "no-referrer"
        assert response.headers["Cache-Control"] == "no-store"
        assert response.headers["Server"].strip() == "energon-packed"  # without the version of Python
        assert b" style=" not in content
        assert not ask(server, path, "HEAD")[1]


@pytest.mark.parametrize(
    "path",
    ["/none", "/pack/none", "/pack/none_00000001", "/pack/" + quote("../" * 8 + "etc/passwd", safe=""), "/pack/%ff%00",
     "/media/image/x/0/0", f"/media/image/{KEY}/999/0", f"/media/image/{KEY}/0/-1", f"/media/image/{KEY}/0/%C2%B2",
     f"/media/json/{KEY}/0/0", f"/media/video/{KEY}/0/0", "/media", "/media/image", f"/media/image/{KEY}",
     f"/tokens/{KEY}/x", "/style.css/..", "/view.html.j2", "/../style.css"],
)  # fmt: skip
def test_unknown_paths_are_one_line(server: ViewServer, path: str) -> None:
    response, content = ask(server, path)
    assert (response.status, response.headers["Content-Type"]) == (404, "text/plain; charset=utf-8")
    assert content.startswith(b"error: ")
    assert content.count(b"\n") == 1


def test_images_are_shown_as_they_are_or_converted(server: ViewServer, out: Path) -> None:
    for name, kind, same in (
        ("a.png", "image/png", True),
        ("c.jpg", "image/jpeg", True),
        ("b.tif", "image/png", False),
    ):
        key, sample = key_with(server.viewer, name)
        response = server.viewer.respond(f"/media/image/{key}/{sample}/0")
        assert response.kind == kind
        assert (response.content == (out.parent / name).read_bytes()) is same
        assert server.viewer.respond(f"/media/image/{key}/{sample}/0/0").status == 404


def test_images_without_text_between_them_have_no_number_of_tokens(out: Path) -> None:
    viewer = viewer_of(out)
    key, sample = key_with(viewer, "a.png")
    pack = viewer._view(viewer._index(key))
    own = pack.samples[sample]
    for images, tokens in ((own.images, 6), (own.images * 2, None)):
        shown = viewer.shown(replace(pack, samples=[*pack.samples[:sample], replace(own, images=images)]))
        assert shown.files[own.images[0].name].tokens == tokens


def test_the_report_is_a_page_with_links(server: ViewServer, out: Path, tmp_path: Path) -> None:
    with Browser(tmp_path) as browser:
        browser.open(server.url)
        browser.open(server.url.partition("?")[0] + "report")
        links = browser.run("[...document.querySelectorAll('a')].map((a) => a.getAttribute('href'))")
        assert f"/pack/{KEY}#sample-0" in links
        assert any(re.fullmatch(r"/pack/\w+", link) for link in links)  # of the least utilized packs
        assert browser.run("getComputedStyle(document.querySelector('.cards')).display") == "grid"
        assert not browser.log
    html = tmp_path / "report.html"
    assert invoke("report", out, "-o", html, "--view", "http://127.0.0.1:8000/").exit_code == 0
    assert f'href="http://127.0.0.1:8000/pack/{KEY}#sample-0"' in html.read_text()
    invoke("report", out, "-o", html)
    assert "/pack/" not in html.read_text()
    assert "--view must be" in invoke("report", out, "-o", html, "--view", "javascript:alert(1)").output


def test_weights_and_columns_are_strips(text_tokenizer_dir: Path, tmp_path: Path) -> None:
    record = {"input_ids": [5] * 9, "labels": [5] * 9, "loss_weights": [1.0] * 5 + [3.0] * 4,
              "logprobs": [-2.0] * 3 + [-1.0] * 6, "flat": [2.0] * 9}  # fmt: skip
    (tmp_path / "data.jsonl").write_text(json.dumps(record))
    pack(tmp_path / "data.jsonl", output_dir=tmp_path / "out", tokenizer=text_tokenizer_dir, seq_len=16, workers=1)
    text = page(viewer_of(tmp_path / "out"), f"/tokens/{KEY}/0")
    strips = dict(re.findall(r"<figcaption>(\w+), (.*?)</figcaption>", text))
    assert strips == {"weight": "0 (pale) to 3", "logprobs": "-2 (pale) to -1", "flat": "2 (pale) to 2"}
    rects = re.findall(r'<rect x="(\d+)" width="(\d+)" height="1" fill-opacity="(.*?)"', text)
    assert ("0", "3", "0.060") in rects
    assert ("3", "6", "1.000") in rects
    assert ("5", "4", "1.000") in rects
    assert ("0", "9", "0.060") in rects


@pytest.mark.parametrize(
    ("query", "count"),
    [("file=data.jsonl&line=3", 1), ("file=data.jsonl&line=9999", 0), ("file=other", 0),
     ("split=train&status=packed", 50),     ("split=val", 0), ("shard=000000&id=a.png", 1), ("shard=000001", 0)],
)  # fmt: skip
def test_records_are_found_by_file_line_split_and_shard(server: ViewServer, query: str, count: int) -> None:
    assert page(server.viewer, f"/records?{query}").count("<tr><td") == count


def test_packs_of_a_split_and_a_shard(text_tokenizer_dir: Path, tmp_path: Path) -> None:
    lines = [json.dumps({"id": str(n), "text": "What is it? " * 3}) for n in range(60)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines))
    options: dict[str, Any] = {"split": "train=0.5,val=0.5", "max_packs_per_shard": 5, "seq_len": 20, "workers": 1}
    pack(tmp_path / "data.jsonl", output_dir=tmp_path / "out", tokenizer=text_tokenizer_dir, **options)
    viewer = viewer_of(tmp_path / "out")
    shown: dict[str, list[str]] = {}
    for split in ("train", "val", ""):
        for number in (1, 2, 3):
            text = page(viewer, f"/?split={split}&page={number}")
            found = re.findall(r"data-item>(\w+)</a> <span class=\"note\">\d+ samples, (\S+), (\w+)<", text)
            assert all(split in ("", own) for *_, own in found)
            shown[split] = list(dict.fromkeys([*shown.get(split, []), *(key for key, *_ in found)]))
    assert shown[""] == [f"out_{n:08d}" for n in range(60)]
    assert sorted(shown["train"] + shown["val"]) == shown[""]
    shard = list(PackedFolder.open(tmp_path / "out").shards)[1]
    assert page(viewer, f"/?shard={shard}").count('class="row"') == 5
    assert page(viewer, "/?shard=none").count('class="row"') == 0
    assert page(viewer, "/?page=99") == page(viewer, "/?page=3")
    assert [f'href="/?page={n}' in page(viewer, "/pack/out_00000020") for n in (1, 2, 3)] == [False, True, False]
    near = [
        re.findall(r'href="/pack/out_0*(\d+)" rel="(\w+)"', page(viewer, f"/pack/out_{n:08d}")) for n in (0, 1, 58, 59)
    ]
    assert near == [
        [("1", "next")],
        [("0", "prev"), ("2", "next")],
        [("57", "prev"), ("59", "next")],
        [("58", "prev")],
    ]
    assert 'viewBox="0 0 20 ' in page(viewer, "/")  # seq_len, which no pack fills


def test_nothing_is_written(server: ViewServer, out: Path) -> None:
    def files() -> list[Any]:
        return [(path, *os.stat(path)[6:9:2], path.stat().st_mtime_ns) for path in sorted(out.rglob("*"))]

    before = files()
    for path in ("/", f"/pack/{KEY}", f"/tokens/{KEY}/0", "/records?id=5", "/rejects", "/text?text=What"):
        assert ask(server, path)[0].status == 200
    assert files() == before


def test_videos_have_frames_and_a_clip_by_ranges(
    tokenizer_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_video(tmp_path / "a.mp4", width=64, height=48, frames=40, fps=10)
    turns = [{"role": "user", "content": "<video>What?"}, {"role": "assistant", "content": "It."}]
    (tmp_path / "data.jsonl").write_text(json.dumps({"id": "a", "messages": turns, "videos": ["a.mp4"]}))
    options: dict[str, Any] = {"video_min_pixels": 3136, "video_max_pixels": 12544, "seq_len": 2048, "workers": 1}
    pack(tmp_path / "data.jsonl", output_dir=tmp_path / "out", tokenizer=tokenizer_dir, **options)
    with ViewServer(viewer_of(tmp_path / "out"), token=False) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        content = (tmp_path / "a.mp4").read_bytes()
        clip = f"/media/video/{KEY}/0/0"
        for header, part in (("bytes=5-99", content[5:100]), ("bytes=50-", content[50:]), ("bytes=-7", content[-7:])):
            response, got = ask(server, clip, Range=header)
            assert (response.status, response.headers["Content-Type"], got) == (206, "video/mp4", part)
        assert ask(server, clip, Range=f"bytes={len(content)}-")[0].status == 416
        assert ask(server, f"/media/frame/{KEY}/0/0/0")[0].status == 200
        assert ask(server, f"/media/frame/{KEY}/0/0")[0].status == 404
        assert f'src="{clip}"' in page(server.viewer, f"/pack/{KEY}")
        with monkeypatch.context() as patch:
            patch.setattr(pages, "_MOST_CLIP", len(content))
            assert f'src="{clip}"' in page(viewer_of(tmp_path / "out"), f"/pack/{KEY}")
            patch.setattr(pages, "_MOST_CLIP", len(content) - 1)
            large = viewer_of(tmp_path / "out")
            assert f'src="{clip}"' not in page(large, f"/pack/{KEY}")
            assert large.respond(clip).status == 404
        with Browser(tmp_path / "profile") as browser:
            browser.open(f"{server.url}pack/{KEY}")
            frames = f"Promise.all([...document.querySelectorAll('.strip img')].map({SIZE}))"
            assert browser.run(frames) == [64] * 8
            assert not browser.log
        server.shutdown()


@pytest.mark.parametrize(("ending", "codec"), [("avi", "mpeg4"), ("mp4", "mpeg4"), ("mkv", "libx264")])
def test_a_video_that_browsers_do_not_play_has_frames_alone(
    ending: str, codec: str, tokenizer_dir: Path, tmp_path: Path
) -> None:
    name = f"a.{ending}"
    make_video(tmp_path / name, codec=codec, b_frames=0, width=64, height=48, frames=40, fps=10)
    turns = [{"role": "user", "content": "<video>What?"}, {"role": "assistant", "content": "It."}]
    (tmp_path / "data.jsonl").write_text(json.dumps({"id": "a", "messages": turns, "videos": [name]}))
    options: dict[str, Any] = {"video_min_pixels": 3136, "video_max_pixels": 12544, "seq_len": 2048, "workers": 1}
    pack(tmp_path / "data.jsonl", output_dir=tmp_path / "out", tokenizer=tokenizer_dir, **options)
    viewer = viewer_of(tmp_path / "out")
    text = page(viewer, f"/pack/{KEY}")
    assert f".{ending}: 8 of 40 frames" in text
    assert viewer.respond(f"/media/video/{KEY}/0/0").status == 404
    assert text.count(f'src="/media/frame/{KEY}/0/0/') == 8
    assert "<video" not in text
    assert "frames not shown" not in text


def test_problems_of_a_search_that_are_not_listed_are_counted(text_tokenizer_dir: Path, tmp_path: Path) -> None:
    records = [{"prompt": f"{n}?", "response": "Yes."} for n in range(60)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    pack(tmp_path / "data.jsonl", output_dir=tmp_path / "out", tokenizer=text_tokenizer_dir, seq_len=256, workers=1,
         max_samples_per_pack=1)  # fmt: skip
    [tar] = (tmp_path / "out" / "webdataset").glob("*.tar")
    tar.write_bytes(b"x" * tar.stat().st_size)
    text = page(viewer_of(tmp_path / "out"), "/text?text=Yes")
    assert text.count("<li>pack ") == 50
    assert "<li>10 more problems</li>" in text


def test_audio_is_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path / "a", "flac", sound(16_000, 16_000), 16_000)
    records: list[Any] = [{"id": "a", "audio": file.name, "text": "hello"}]
    records.append({"id": "b", "audio": {"path": file.name, "offset": 0.25, "duration": 0.5}, "text": "hi"})
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    model = qwen2_audio(tmp_path / "model")
    pack(tmp_path / "data.jsonl", output_dir=tmp_path / "out", tokenizer=model, seq_len=2048, workers=1)
    viewer = viewer_of(tmp_path / "out")
    for ident, kind in (("a", "audio/flac"), ("b", "audio/wav")):
        key, sample = key_with(viewer, ident)
        assert f'<audio controls preload="none" src="/media/audio/{key}/{sample}/0"' in page(viewer, f"/pack/{key}")
        assert viewer.respond(f"/media/audio/{key}/{sample}/0").kind == kind
    monkeypatch.setattr(report_data, "_MAX_DRAWN", 0.4)  # seconds; a has 1, and b 0.5
    for key, sample in (key_with(viewer, ident) for ident in "ab"):
        assert f'src="/media/audio/{key}/{sample}/0"' not in page(viewer_of(tmp_path / "out"), f"/pack/{key}")
        assert viewer_of(tmp_path / "out").respond(f"/media/audio/{key}/{sample}/0").status == 404


def test_groups_are_side_by_side(text_tokenizer_dir: Path, tmp_path: Path) -> None:
    record = {"id": "pair", "prompt": "Hi?", "chosen": "Yes.", "rejected": "No."}
    plain = {"prompt": "Hi?", "response": "Yes."}
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, [record, plain, plain])))
    pack(tmp_path / "data.jsonl", output_dir=tmp_path / "out", tokenizer=text_tokenizer_dir, seq_len=256, workers=1)
    text = page(viewer_of(tmp_path / "out"), f"/pack/{KEY}")
    assert text.count("<article") == 4
    _, group = text.split('<div class="group">')
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, [plain, plain])))
    pack(tmp_path / "data.jsonl", output_dir=tmp_path / "b", tokenizer=text_tokenizer_dir, seq_len=256, workers=1,
         pad_multiple=64)  # fmt: skip
    viewer, key = viewer_of(tmp_path / "b"), KEY.replace("out", "b")
    assert 'class="group"' not in page(viewer, f"/pack/{key}")
    assert [sample.start for sample in viewer.samples(key)] == [0, 64]
    assert ", chosen" in group
    assert ", rejected" in group


def test_a_large_table_is_read_in_parts(tmp_path: Path) -> None:
    rows, group = 1_000_000, 100_000
    places = np.arange(rows)
    columns = {name: pa.array(places % 997) for name in ("row", "line", "length", "num_images", "sample")}
    columns["length"] = pa.array(places % 4096)
    columns["id"] = pa.array(places.astype(str))
    for name in ("source", "status", "pack", "shard"):
        columns[name] = pa.DictionaryArray.from_arrays(pa.array(np.zeros(rows, np.int32)), ["packed"])
    pq.write_table(pa.table(columns), tmp_path / "lengths.parquet", row_group_size=group)
    del columns
    before, start, found = pa.set_memory_pool, 0, []
    old = pa.default_memory_pool()
    pool = pa.proxy_memory_pool(old)
    pa.set_memory_pool(pool)
    try:
        while start is not None:
            some, start, _ = matching_records(
                tmp_path / "lengths.parquet",
                record_tests(ident="99999", shortest=1, longest=4000),
                start=start,
                limit=3,
            )
            found += some
    finally:
        before(old)
    expected = [str(n) for n in range(rows) if "99999" in str(n) and 1 <= n % 4096 <= 4000]
    assert [record.id for record in found] == expected
    assert (pool.max_memory() or 0) < 32 << 20


def test_pages_without_reports(out: Path, tmp_path: Path) -> None:
    """The list of packs needs no report of the run; the other pages say which file is missing or damaged."""
    tmp_path = tmp_path / "two\nlines"
    tmp_path.mkdir()
    (tmp_path / "webdataset").symlink_to(out / "webdataset")
    viewer = viewer_of(tmp_path)
    assert KEY in page(viewer, "/")
    assert "lengths.parquet does not exist" in page(viewer, "/records")
    (tmp_path / "lengths.parquet").write_bytes(b"x")
    response = viewer.respond("/records")
    assert response.status == 500
    assert response.content.count(b"\n") == 1
    assert KEY in page(viewer, "/")


@pytest.mark.parametrize("place", ["1 - sample_index", "7"])
def test_third_party_packs_are_found_by_their_index(place: str, tmp_path: Path) -> None:
    folder = tmp_path / "packs"
    folder.mkdir()
    write_tar(folder / "a.tar", [*llava_pack("ps_a", ["red"]), *llava_pack("ps_b", ["green"])])
    make_nv_meta(folder)
    assert "It is green." in page(viewer_of(folder), "/pack/ps_b")
    assert f"{tmp_path / 'rejects.jsonl'} does not exist." in page(viewer_of(folder), "/rejects")
    with sqlite3.connect(folder / ".nv-meta" / "index.sqlite") as index:
        index.execute(f"UPDATE samples SET sample_index = {place}")
    index.close()
    response = viewer_of(folder).respond("/pack/ps_b")
    assert (response.status, response.content) == (
        500, b"error: index.sqlite does not match the tars at ps_b; run energon-packed nv-meta\n",
    )  # fmt: skip


def test_a_found_text_is_shown_once_with_the_text_around(text_tokenizer_dir: Path, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": f"Find me{'!' * 81}?"}, {"role": "assistant", "content": "Find me"}]
    records = [{"id": "a", "messages": turns}, {"id": "long", "text": "so " * 200}]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    pack(tmp_path / "data.jsonl", output_dir=tmp_path / "out", tokenizer=text_tokenizer_dir, seq_len=128, workers=1,
         overlong="split")  # fmt: skip
    viewer = viewer_of(tmp_path / "out")
    assert re.findall(r"Find me!*\??", page(viewer, "/text?text=Find+me").split("<tbody>")[1]) == [
        f"Find me{'!' * 80}"
    ]
    text = page(viewer, "/records?status=split")  # it has fragments, and is not rejected
    assert (text.count("<tr><td"), ">none<" in text, "/rejects?reason" in text) == (1, True, False)


def test_the_packs_around_a_damaged_pack_are_shown(out: Path, tmp_path: Path) -> None:
    copy = copied_output(out / "webdataset", tmp_path / "out")
    tar = next(copy.glob("*.tar"))
    content = bytearray(tar.read_bytes())
    content[512] ^= 0xFF  # first byte of the JSON of the first pack
    tar.write_bytes(content)
    viewer = viewer_of(tmp_path / "out")
    for path in ("/", "/text?text=What"):
        text = page(viewer, path)
        assert "<li>pack 0: " in text
        assert "/pack/out_00000001" in text
        assert f"/pack/{KEY}" not in text
    response = viewer.respond(f"/pack/{KEY}")
    assert response.status == 500
    assert response.content.count(b"\n") == 1


def test_the_command_prints_its_address_and_ends_with_ctrl_c(out: Path) -> None:
    command = [sys.executable, "-m", "energon_packed", "view", str(out), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = urlsplit(process.stdout.readline().strip())
        assert address.hostname == "127.0.0.1"
        connection = HTTPConnection("127.0.0.1", address.port or 0, timeout=60)
        connection.request("GET", f"/?{address.query}")
        assert connection.getresponse().status == 303
        process.send_signal(signal.SIGINT)  # while the connection is open
        assert process.communicate(timeout=30)[1] == ""
        connection.close()
    assert process.returncode == 0


def test_the_first_page_does_not_wait_for_the_tokenizer(out: Path, tmp_path: Path) -> None:
    folder, loads = PackedFolder.open(out), []

    def load() -> Any:
        loads.append(1)
        return folder.encoder_or_reason(None)

    viewer = Viewer(folder, load)
    for path in ("/records", "/rejects", "/text?text=What"):
        page(viewer, path)
    first = page(viewer, "/")
    assert not loads
    assert '<meta http-equiv="refresh" content="0">' in first
    assert "Kinds of tokens are unknown: the tokenizer is being loaded" in first
    assert KEY in first
    assert 'class="text"' in first
    for _ in range(2):
        second = page(viewer, "/")
        assert "refresh" not in second
        assert "Kinds of tokens" not in second
        assert 'class="supervised"' in second
    assert page(viewer, f"/pack/{KEY}")
    assert len(loads) == 1
    viewer = Viewer(folder, load)
    assert 'class="turn supervised"' in page(viewer, f"/pack/{KEY}")  # a link to a pack waits
    assert 'class="supervised"' in page(viewer, "/")
    with served(Viewer(folder, load)) as server, Browser(tmp_path) as browser:
        browser.open(server.url)
        until(browser, "document.readyState === 'complete' && !document.querySelector('meta[http-equiv]')")
        assert browser.run("document.querySelectorAll('.row .supervised').length") == 20
        assert browser.run("history.length") <= 2
        assert not browser.log


def test_the_first_page_imports_neither_torch_nor_transformers(out: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from tests.internals import view_command;"
        "pages = view_command._pages((sys.argv[1],), {}, Path('unused')); assert pages.respond('/').status == 200;"
        "print({'torch', 'transformers', 'numba', 'megatron', 'matplotlib', 'pandas'} & sys.modules.keys())"
    )
    run = subprocess.run([sys.executable, "-c", code, str(out)], capture_output=True, text=True, check=False)
    assert (run.stdout, run.stderr) == ("set()\n", "")


def test_a_wrong_tokenizer_is_one_line(out: Path, tokenizer_dir: Path, tmp_path: Path) -> None:
    missing = invoke("view", out, "--tokenizer", tmp_path / "none", "--no-browser")
    assert f"{tmp_path / 'none'} is not a folder" in str(missing.exception or missing.output)
    other = shutil.copytree(tokenizer_dir, tmp_path / "other")
    (other / "chat_template.jinja").write_text("{{ messages }}")
    damaged = shutil.copytree(tokenizer_dir, tmp_path / "damaged")
    (damaged / "chat_template.jinja").write_text("{% damaged")
    linked = shutil.copytree(tokenizer_dir, tmp_path / "linked")
    (linked / "link").symlink_to("removed")
    for name, problem in ((other, "must be those that"), (tmp_path, "has no tokenizer.json"),
                          (damaged, "is not valid Jinja"), (linked, "No such file")):  # fmt: skip
        viewer = view_command._pages((str(out),), {"tokenizer": name}, Path("unused"))
        page(viewer, "/")
        text = page(viewer, "/")
        assert problem in text
        assert "Traceback" not in text
        assert "Supervised text is not marked: " in page(viewer, f"/pack/{KEY}")
        response = viewer.respond(f"/tokens/{KEY}/0")
        assert response.status == 500
        assert response.content.count(b"\n") == 1


def test_ranges_outside_the_content(tokenizer_dir: Path, server: ViewServer, out: Path) -> None:
    key, sample = key_with(server.viewer, "c.jpg")
    content, path = (out.parent / "c.jpg").read_bytes(), f"/media/image/{key}/{sample}/0"
    size = len(content)
    for header, first, last in ((f"bytes=9-{size + 99}", 9, size - 1), (f"bytes=-{size + 99}", 0, size - 1),
                                (f"bytes={size - 1}-{size - 1}", size - 1, size - 1)):  # fmt: skip
        response, got = ask(server, path, Range=header)
        assert (response.status, got) == (206, content[first : last + 1])
        assert response.headers["Content-Range"] == f"bytes {first}-{last}/{size}"
        assert response.headers["Accept-Ranges"] == "bytes"  # players seek only then
    for header in ("bytes=9-5", "bytes=-0", "bytes=-", f"bytes={size}-{size}"):
        response, got = ask(server, path, Range=header)
        assert (response.status, response.headers["Content-Range"], got) == (416, f"bytes */{size}", b"")
    for header in ("bytes=0-1,3-4", "items=0-1", "bytes=" + "9" * 99 + "-"):  # the whole content is an answer too
        response, got = ask(server, path, Range=header)
        assert (response.status, got) == (200, content)
    assert ask(server, "/", Range="bytes=0-1")[0].status == 200  # a page is not a file


@pytest.mark.parametrize("number", ["9" * 5000, "-1", "x", "\u00b2", ""])
def test_numbers_of_a_query_that_are_none(server: ViewServer, number: str) -> None:
    value = quote(number)
    assert KEY in page(server.viewer, f"/?page={value}")
    for path in (f"/records?from={value}&min={value}&line={value}", f"/rejects?from={value}", f"/text?from={value}"):
        assert page(server.viewer, path)
    assert server.viewer.respond(f"/tokens/{KEY}/{value}").status == 404


def test_hostile_keys_are_quoted(out: Path, tokenizer_dir: Path, tmp_path: Path) -> None:
    key = "k\"'<img src=x onerror=alert(1)>&?#%41 "
    folder = tmp_path / "tars"
    folder.mkdir()
    with tarfile.open(next((out / "webdataset").glob("*.tar"))) as old, tarfile.open(folder / "a.tar", "w") as new:
        for member in old:
            if member.name.startswith(KEY):
                renamed = tarfile.TarInfo(key + member.name.removeprefix(KEY))
                renamed.size = member.size
                new.addfile(renamed, old.extractfile(member))
    make_nv_meta(folder)
    viewer = Viewer(opened := PackedFolder.open(folder), partial(opened.encoder_or_reason, tokenizer_dir))
    viewer.respond("/")
    assert page(viewer, "/?shard=none").count('class="row"') == 0
    link = f"/pack/{quote(key, safe='')}"
    for path in ("/", link):
        text = page(viewer, path)
        assert "<img src=x" not in text
        assert f'href="{link}#sample-0"' in text or path == link
    assert f'href="/tokens/{quote(key, safe="")}/0"' in page(viewer, link)
    assert f'href="{link}#sample-0"' in page(viewer, link.replace("/pack/", "/tokens/") + "/0")
    assert page(viewer, f"/text?text={quote('What is')}").count(f'href="{link}#sample-') > 0
    with served(viewer) as server, Browser(tmp_path / "profile") as browser:
        browser.open(server.url)
        browser.run("document.querySelector('a[data-item]').click()")
        until(browser, f"document.title === {json.dumps(key.strip())}")
        assert browser.run("document.querySelector('h1').textContent") == key
        assert not browser.log


def test_rejected_records_continue_after_the_last(server: ViewServer) -> None:
    text, first = page(server.viewer, "/rejects"), 'href="/rejects?from=50" rel="next"'
    assert text.count("<tr><td") == 50
    assert first in text
    rest = page(server.viewer, "/rejects?from=50")
    assert rest.count("<tr><td") == 10
    assert 'rel="next"' not in rest
    assert page(server.viewer, "/rejects?reason=missing_image").count("<tr><td") == 0


def test_searches_have_a_time_bound(server: ViewServer, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [(most, value)] = re.findall(r'max="(\d+)" value="(\d+)"', page(server.viewer, "/text?text=absent"))
    assert value == most
    monkeypatch.setattr(packs_pages, "_SEARCH_SECONDS", 0.0)
    below = Viewer(PackedFolder.open(out), lambda: (None, "none"), base="/3")
    assert 'href="/3/text?text=absent&amp;from=' in page(below, "/text?text=absent")
    text = page(server.viewer, "/text?text=absent")
    progress = re.search(r'max="(\d+)" value="(\d+)"', text)
    assert progress is not None
    assert int(progress[2]) < int(progress[1])
    more = re.findall(r'href="/text\?(.*?)" rel="next"', text)
    assert more == [f"text=absent&amp;from={progress[2]}"]
    monkeypatch.setattr(run_reports, "_BATCH_ROWS", 10)
    text = page(server.viewer, "/records?id=absent")
    assert 'href="/records?id=absent&amp;from=' in text


def test_rows_of_large_packs_have_lengths_only(server: ViewServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packs_pages, "_MOST_MAPPED", 30_000)
    text = page(server.viewer, "/")
    rows = text.split('<div class="row">')[1:]
    known = ['class="supervised"' in row for row in rows]
    assert any(known)
    assert not all(known)
    assert all('class="sample"' in row for row in rows)


def test_a_port_in_use_is_one_line(out: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        result = invoke("view", out, "--no-browser", "--port", other.getsockname()[1])
    assert result.exit_code != 0
    assert "`port` must be free, got" in str(result.exception or result.output)

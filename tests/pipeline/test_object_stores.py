"""Outputs in an object store: the bytes of a local run, whatever happens to the run or to its requests.

`ENERGON_PACKED_KILLS=20` and `ENERGON_PACKED_FAULTS=50` are the long forms.
"""

import base64
import json
import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from energon_packed import ConfigError, RejectLimitError, pack
from tests.internals import as_path, cli, run_status
from tests.pipeline.faults import Ran
from tests.pipeline.undisturbed import Build
from tests.storage import BUCKET, SECRET, Store

KILLS = int(os.environ.get("ENERGON_PACKED_KILLS", "3"))
FAULTS = int(os.environ.get("ENERGON_PACKED_FAULTS", "6"))
MANIFEST = "webdataset/.nv-meta/packing.json"
URL = f"s3://{BUCKET}/out"


def contents(store: Store) -> dict[str, bytes]:
    """As `undisturbed.contents`, of the output in the store."""
    found = {name: content for name, content in store.objects("out").items() if not name.startswith(".work/")}
    if MANIFEST in found:
        manifest = json.loads(found[MANIFEST])
        del manifest["counters"], manifest["tokenizer_engine"]
        found[MANIFEST] = json.dumps(manifest).encode()
    return found


class Runs:
    """Runs of one command with an output in the store.

    Args:
        build: what they must come to.
        work: folder of their restart state.
    """

    def __init__(self, build: Build, work: Path) -> None:
        self.build, self.work = build, work

    def start(self, *more: Any, work: Path | None = None, url: str = URL) -> Path:
        names = ("AWS_", "MSC_")
        environment = {name: value for name, value in os.environ.items() if name.startswith(names)}
        arguments = self.build.arguments(url, "--work-dir", work or self.work, *more)  # type: ignore[arg-type]
        return self.build.command_line.start(*arguments, out=self.work, environment=environment)

    def end(self, notes: Path) -> Ran:
        return self.build.command_line.end(notes)

    def run(self, *more: Any, **settings: Any) -> Ran:
        return self.end(self.start(*more, **settings))

    def process(self) -> int:
        """The run that is active."""
        return int(json.loads(next(self.work.glob("*/owner.json")).read_bytes())["pid"])


@pytest.fixture
def runs(store: Store, undisturbed: Build, tmp_path: Path) -> Iterator[Runs]:
    yield Runs(undisturbed, tmp_path / "work")
    store.intercept = lambda environ: None


def check_complete(store: Store, runs: Runs, *more: Any) -> dict[str, int]:
    """One more run completes the output; return its counters."""
    ran = runs.run(*more)
    assert (ran.status, ran.err) == (0, "")
    assert contents(store) == runs.build.files
    assert ".work/owner.json" not in store.objects("out")
    assert not list(runs.work.rglob("*.tmp"))
    return dict(json.loads(store.objects("out")[MANIFEST])["counters"])


def check_nothing_half_written(store: Store, runs: Runs) -> None:
    for name, content in contents(store).items():
        assert content == runs.build.files[name], name


def test_objects_are_the_files_of_a_local_run(store: Store, runs: Runs) -> None:
    with store.counted() as traffic:
        check_complete(store, runs)
    stored = [request.removeprefix("PUT /bucket/out/") for request in traffic.requests if request[:3] == "PUT"]
    assert stored[-1] == MANIFEST
    indexes = [name for name in stored if name.startswith("webdataset/.nv-meta")]
    assert indexes == stored[-len(indexes) :]
    # No credentials in what is written; what is printed is checked by all tests here.
    for content in (*store.objects("out").values(), *(f.read_bytes() for f in runs.work.rglob("*") if f.is_file())):
        assert SECRET.encode() not in content


def test_a_restart_uploads_what_is_missing_or_changed(store: Store, runs: Runs) -> None:
    check_complete(store, runs)
    first, second, third, *_ = tars = sorted(name for name in runs.build.files if name.endswith(".tar"))
    store.client.delete_object(Bucket=BUCKET, Key=f"out/{first}")
    store.put(f"out/{second}", runs.build.files[second])  # the same bytes, without the hash
    store.client.put_object(
        Bucket=BUCKET, Key=f"out/{third}", Body=bytes(len(runs.build.files[third])), Metadata={"sha256": "0"}
    )
    with store.counted() as traffic:
        counters = check_complete(store, runs)
    assert (counters["shards_written"], counters["shards_reused"]) == (3, len(tars) - 3)
    assert counters["measured"] == 0
    assert sum(bool(re.search(r"PUT .*\.tar$", request)) for request in traffic.requests) == 3


def test_the_output_of_another_run_is_kept_without_overwrite(store: Store, runs: Runs, tmp_path: Path) -> None:
    check_complete(store, runs)
    before = store.objects("out")
    for work in (tmp_path / "work", tmp_path / "other"):  # on this machine, and on another
        ran = runs.run("--seed", 7, work=work)
        assert ran.status == 1
        assert re.fullmatch(
            r"error: s3://bucket/out/webdataset contains shards of another run \(`?-?-?seed`? was 0, now 7\)\. .*\n",
            ran.err,
        ), ran.err
    assert store.objects("out") == before
    assert runs.run("--seed", 7, "--overwrite").status == 0
    assert contents(store) != runs.build.files
    check_complete(store, runs, "--overwrite")


@contextmanager
def paused(store: Store, pattern: str) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Hold the first request that matches; yields the events that it has come, and that it may go on."""
    come, may_go = threading.Event(), threading.Event()

    def hold(environ: dict[str, Any]) -> None:
        if not come.is_set() and re.search(pattern, f"{environ['REQUEST_METHOD']} {environ['PATH_INFO']}"):
            come.set()
            assert may_go.wait(120)

    store.intercept = hold
    yield come, may_go
    may_go.set()


def test_of_two_runs_the_second_is_refused(
    store: Store, runs: Runs, demo: Any, tokenizer_dir: Path, tmp_path: Path
) -> None:
    options = {"output_dir": URL, "tokenizer": tokenizer_dir, "seq_len": 512, "workers": 1}
    with paused(store, r"PUT .*/s-000001\.tar$") as (come, may_go):
        notes = runs.start()
        assert come.wait(120)
        with pytest.raises(ConfigError, match=rf"belongs to process {runs.process()} on \S+, which writes there or"):
            pack(str(demo.jsonl), **options, work_dir=tmp_path / "other")
        with pytest.raises(ConfigError, match=rf"is being written by process {runs.process()} on"):
            pack(str(demo.jsonl), **options, work_dir=runs.work)
        assert not list((tmp_path / "other").rglob("*.*"))
        status = run_status(as_path(URL), runs.work)[0]
        assert (status.stage, bool(status.running)) == ("written", True)
        may_go.set()
        assert runs.end(notes).status == 0
    assert contents(store) == runs.build.files


def test_a_run_that_was_taken_over_ends_in_one_line(
    store: Store, runs: Runs, demo: Any, tokenizer_dir: Path, tmp_path: Path
) -> None:
    with paused(store, r"PUT .*/s-000001\.tar$") as (come, may_go):
        notes = runs.start()
        assert come.wait(120)
        other = {"output_dir": URL, "tokenizer": tokenizer_dir, "seq_len": 512, "workers": 1, "max_reject_rate": 1}
        manifest = pack(str(demo.jsonl), **other, work_dir=tmp_path / "other", overwrite=True).manifest
        may_go.set()
        ran = runs.end(notes)
    assert ran.status == 1
    assert re.fullmatch(r"error: s3://bucket/out was taken over by another run, .*\n", ran.err), ran.err
    assert json.loads(store.objects("out")[MANIFEST])["fingerprint"] == manifest.fingerprint


@pytest.mark.parametrize("number", range(KILLS))
def test_after_a_kill_one_run_gives_the_same_bytes(store: Store, runs: Runs, number: int) -> None:
    """At the n-th request: before it reaches the store, or some milliseconds later."""
    rng = random.Random(number)
    at, delay = rng.randrange(60) if number else 20, rng.choice([0.0, 0.0, 0.002, 0.05])
    requests = iter(range(10**6))
    target: list[int] = []

    def kill() -> None:
        time.sleep(delay)
        with suppress(ProcessLookupError):
            if number % 3:
                os.kill(target[0], signal.SIGKILL)
            else:
                os.killpg(target[0], signal.SIGKILL)

    def intercept(environ: dict[str, Any]) -> int | None:
        if not target and next(requests) >= at and list(runs.work.glob("*/owner.json")):
            target.append(runs.process())
            if delay:
                threading.Thread(target=kill).start()
                return None
            kill()
            return 0
        return None

    store.intercept = intercept
    ran = runs.run()
    assert target
    store.intercept = lambda environ: None
    check_nothing_half_written(store, runs)
    if ran.status != 0:
        assert (ran.status, ran.err) == (-signal.SIGKILL, "")
    check_complete(store, runs)


@pytest.mark.parametrize("number", range(FAULTS))
def test_a_failed_request_is_one_line_and_a_restart_completes(store: Store, runs: Runs, number: int) -> None:
    rng = random.Random(number)
    status = [500, 503, 403, 0, 429, 404][number % 6]
    at, count = rng.randrange(60), rng.choice([1, 1, 1000])
    requests = iter(range(10**6))
    store.intercept = lambda environ: status if at <= next(requests) < at + count else None
    ran = runs.run()
    store.intercept = lambda environ: None
    check_nothing_half_written(store, runs)
    assert SECRET not in ran.out + ran.err
    if ran.status != 0:
        assert re.fullmatch(r"error: [^\n]*(s3://bucket/out|output folder)[^\n]*\n", ran.err), ran.err
    check_complete(store, runs)


def test_a_silent_store_is_one_line(store: Store, runs: Runs, tmp_path: Path) -> None:
    """The client of the profile waits 4 s for an answer, which other requests get earlier on a busy machine."""
    config = json.loads(Path(os.environ["MSC_CONFIG"]).read_text())
    config["profiles"]["store"]["storage_provider"]["options"]["read_timeout"] = 4
    (tmp_path / "msc.json").write_text(json.dumps(config))
    with pytest.MonkeyPatch.context() as patch, paused(store, r"PUT .*/s-000001\.tar$") as (_, may_go):
        patch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
        ran = runs.run(url="msc://store/out")
        may_go.set()
    assert ran.status == 1
    assert re.fullmatch(r"error: msc://store/out/webdataset/s-000001\.tar: .*Timeout.*\n", ran.err), ran.err
    check_complete(store, runs)


def test_large_shards_are_uploaded_in_parts(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads(Path(os.environ["MSC_CONFIG"]).read_text())
    options = config["profiles"]["store"]["storage_provider"]["options"]
    config["profiles"]["parts"] = config["profiles"]["store"]
    options |= {"multipart_threshold": 6 << 20, "multipart_chunksize": 5 << 20}
    (tmp_path / "msc.json").write_text(json.dumps(config))
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.json"))
    content = random.Random(0).randbytes(12 << 20)
    (tmp_path / "f").write_bytes(content)
    path = as_path("msc://parts/out/f")
    store.intercept = lambda environ: 503 if "partNumber=2" in environ["QUERY_STRING"] else None
    with pytest.raises(OSError, match=r"msc://parts/out/f: "):
        path.upload(tmp_path / "f")
    store.intercept = lambda environ: None
    assert not path.exists()
    assert not store.client.list_multipart_uploads(Bucket=BUCKET).get("Uploads")
    path.upload(tmp_path / "f")
    assert store.objects("out") == {"f": content}
    # As a killed process leaves it: only uploads below the prefix of the output are aborted.
    for key in ("out/g", "output/g"):
        store.client.create_multipart_upload(Bucket=BUCKET, Key=key)
    as_path("msc://parts/out").abort_uploads()
    assert [upload["Key"] for upload in store.client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]] == ["output/g"]


def test_a_run_aborts_no_upload_of_another_run(store: Store, build: Any, tmp_path: Path) -> None:
    keys = ["other/model.bin", "out/inner/webdataset/x.tar", "out/webdataset/killed.tar"]
    for key in keys:
        store.client.create_multipart_upload(Bucket=BUCKET, Key=key)
    build([{"text": "hello there"}], output_dir=URL, work_dir=tmp_path / "work")
    uploads = {upload["Key"] for upload in store.client.list_multipart_uploads(Bucket=BUCKET)["Uploads"]}
    assert uploads & {*keys} == {*keys[:2]}


def test_too_many_rejects_leave_the_reports_alone(store: Store, build: Any, tmp_path: Path) -> None:
    with pytest.raises(RejectLimitError, match=r"s3://bucket/out/rejects\.jsonl"):
        build(['{"a":', "{"], output_dir=URL, work_dir=tmp_path / "work", max_reject_rate=0)
    assert sorted(store.objects("out")) == ["lengths.parquet", "rejects.jsonl"]


def test_work_dir_is_checked(build: Any, store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}]
    with pytest.raises(ConfigError, match=r"`work_dir` must be omitted for a local `output_dir`, got"):
        build(records, work_dir=tmp_path / "work")
    with pytest.raises(ConfigError, match=r"`work_dir` .*is remote"):
        build(records, output_dir=URL, work_dir="s3://bucket/work")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: type("Usage", (), {"free": 1000}))
    with pytest.raises(ConfigError, match=rf"unfinished shards need about .* of {tmp_path}/work/\w+ has .* free"):
        build(records, output_dir=URL, work_dir=tmp_path / "work")
    assert not store.objects("out").keys() & {MANIFEST}


def run_command(*arguments: Any) -> None:
    done = CliRunner().invoke(cli, [*map(str, arguments)])
    assert done.exit_code == 0, (done.output, done.exception)


def files_of(folder: Path) -> dict[str, bytes]:
    paths = [path for path in folder.rglob("*") if path.is_file() and ".work" not in path.parts]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def without_paths(files: dict[str, bytes], *names: str) -> dict[str, bytes]:
    return {name: content for name, content in files.items() if not name.endswith(names)}


def test_media_in_no_file_are_stored_in_the_object_store(store: Store, build: Any, tmp_path: Path) -> None:
    image = base64.b64encode((Path(__file__).parents[1] / "golden").rglob("*.jpg").__next__().read_bytes()).decode()
    turns = [{"role": "user", "content": "<image>a"}, {"role": "assistant", "content": "b"}]
    records = [{"messages": turns, "images": [f"data:image/jpeg;base64,{image}"]} for _ in range(3)]
    settings = {"media": "reference", "shard_prefix": "s", "seq_len": 4096}
    build(records, **settings)
    build(records, **settings, output_dir=URL, work_dir=tmp_path / "work")
    local, remote = files_of(tmp_path / "out"), store.objects("out")
    assert sum(name.startswith("media/media-") for name in local) == 2
    assert without_paths(remote, "run.json", "packing.json") == without_paths(local, "packing.json")
    run_command("materialize", tmp_path / "out", "-o", "s3://bucket/full")
    run_command("materialize", tmp_path / "out", "-o", tmp_path / "full")
    assert store.objects("full") == files_of(tmp_path / "full")


def test_commands_write_to_the_object_store(store: Store, pack_demo: Any, tmp_path: Path) -> None:
    folder = pack_demo().shards
    copy = tmp_path / "webdataset"
    shutil.copytree(folder, copy)
    for file in copy.glob("*.tar"):
        store.put(f"out/webdataset/{file.name}", file.read_bytes())
    store.put("out/webdataset/old.tar.idx", b"")
    store.put("out/webdataset/.nv-meta/packing.json", b"{}")
    (copy / ".nv-meta" / "packing.json").write_text("{}")
    run_command("nv-meta", copy)
    run_command("nv-meta", "s3://bucket/out")
    for file in copy.glob("*.tar"):  # put without metadata
        store.client.delete_object(Bucket=BUCKET, Key=f"out/webdataset/{file.name}")
    assert store.objects("out/webdataset") == without_paths(files_of(copy), ".tar")
    run_command("metadataset", "s3://bucket/mix/mix.yaml", folder)
    run_command("report", folder, "-o", "s3://bucket/mix/report.html")
    written = store.objects("mix")
    assert f"path: {folder}\n" in written["mix.yaml"].decode()
    assert b"<html" in written["report.html"]

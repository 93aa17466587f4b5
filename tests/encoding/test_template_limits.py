"""A chat template that raises costs the record, one that computes or allocates without end stops the run."""

import json
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from energon_packed import ChatEncoder, Reason, RecordError, TemplateError, normalize
from tests.internals import OutOfTime, call_in_child, main, time_limit
from tests.internals import template as template_module
from tests.processes import run_python

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% if 'odd' in m.content %}BODY{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ALLOCATING = [  # 10 GB in one call, and in many
    "{{ 'a' * 10 ** 10 }}",
    "{{ 'a'.center(10 ** 10) }}",
    "{{ 'a' | center(10 ** 10) }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ range(99999) | join('a' * 99999) }}",
    "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
]
PLAIN = {"messages": [{"role": "user", "content": "Is it?"}, {"role": "assistant", "content": "It is."}]}
ODD = {"messages": [{"role": "user", "content": "odd"}, {"role": "assistant", "content": "It is."}]}


def encoder_of(folder: Path, template: str) -> ChatEncoder:
    encoder = ChatEncoder.from_pretrained(folder)
    encoder.tokenizer.chat_template = template
    return ChatEncoder(encoder.tokenizer)


@pytest.mark.parametrize(
    "body",
    [
        "{{ 1 / 0 }}",
        "{{ range(10 ** 9) }}",
        "{{ 'x' * 10 ** 15 }}",
        "{{ messages[9].content }}",
        "{{ m.content.nothing() }}",
        "{{ ''.join(messages) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ raise_exception('no') }}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_a_template_that_raises_costs_the_record(text_tokenizer_dir: Path, body: str) -> None:
    encoder = encoder_of(text_tokenizer_dir, CHATML.replace("BODY", body))
    first, second = encoder.measure([normalize(ODD), normalize(PLAIN)])
    assert first.reject is not None
    assert first.reject.reason in (Reason.MISSING_FIELD, Reason.BAD_ROLE)
    assert "the chat template" in first.reject.detail
    assert "\n" not in first.reject.detail.strip()
    assert second.length > 0


def test_a_template_that_never_ends_stops_in_one_line(
    text_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_module, "RENDER_LIMIT", 0.2)
    encoder = encoder_of(text_tokenizer_dir, CHATML.replace("BODY", ENDLESS))
    assert encoder.length(normalize(PLAIN)) > 0
    with pytest.raises(TemplateError, match=r"did not finish rendering a conversation of \d+ characters in 0.2 sec"):
        encoder.length(normalize(ODD))
    large = {"messages": [{"role": "user", "content": "odd " * 50_000}, PLAIN["messages"][1]]}
    with pytest.raises(RecordError, match=r"not_rendered: the chat template did not finish in 0.2 seconds \(200,"):
        encoder.length(normalize(large))
    with pytest.raises(TemplateError, match="fix its loops in the tokenizer folder"):
        encoder_of(text_tokenizer_dir, ENDLESS).length(normalize(PLAIN))
    assert encoder.length(normalize(PLAIN)) > 0
    assert signal.getitimer(signal.ITIMER_VIRTUAL)[0] == 0


def test_a_template_that_never_ends_is_tried_once(text_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_module, "RENDER_LIMIT", 0.2)
    tried = []
    monkeypatch.setattr(
        template_module, "call_in_child", lambda *args, **kw: tried.append(1) or call_in_child(*args, **kw)
    )
    encoder = encoder_of(text_tokenizer_dir, ENDLESS + CHATML)
    for _ in range(3):
        with pytest.raises(TemplateError, match="did not finish rendering"):
            encoder.length(normalize(PLAIN))
    assert tried == [1]


def test_a_template_that_renders_is_tried_once_for_all_encoders(
    text_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = []
    monkeypatch.setattr(
        template_module, "call_in_child", lambda *args, **kw: tried.append(1) or call_in_child(*args, **kw)
    )
    template = CHATML + "{% if eos_token == 'odd' %}" + ENDLESS + "{% endif %}"
    for _ in range(3):
        encoder = encoder_of(text_tokenizer_dir, template)
        assert encoder.length(normalize(PLAIN)) > 0
    assert tried == [1]
    monkeypatch.setattr(template_module, "RENDER_LIMIT", 0.2)
    encoder.tokenizer.eos_token = "odd"
    for count in (2, 3):  # a template that failed is tried again
        with pytest.raises(TemplateError, match="did not finish rendering"):
            ChatEncoder(encoder.tokenizer).length(normalize(PLAIN))
        assert len(tried) == count


@pytest.mark.parametrize("body", ALLOCATING)
def test_a_template_that_allocates_without_end_stops_in_one_line(
    text_tokenizer_dir: Path, body: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_module, "RENDER_MEMORY", 1 << 28)  # less to fill
    encoder = encoder_of(text_tokenizer_dir, body + CHATML)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TemplateError, match=r"cannot render a question and an answer: it needs more than 2 GiB") as no:
        encoder.length(normalize(PLAIN))
    assert "\n" not in str(no.value)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20, "KiB of this process"


def test_a_record_for_which_a_template_allocates_without_end_is_rejected(text_tokenizer_dir: Path) -> None:
    """In a process without other threads, as workers are."""
    code = """
import json, resource, sys
from energon_packed import normalize
from tests.encoding.test_template_limits import ALLOCATING, CHATML, ODD, PLAIN, Path, encoder_of, template_module
limit, template_module.RENDER_MEMORY = resource.getrlimit(resource.RLIMIT_DATA), 1 << 28
for body in ALLOCATING:
    encoder = encoder_of(Path(sys.argv[1]), CHATML.replace("BODY", body))
    odd, plain = encoder.measure([normalize(ODD), normalize(PLAIN)])
    assert plain.length > 0
    print(odd.reject)
    assert resource.getrlimit(resource.RLIMIT_DATA) == limit
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""
    done = run_python(code, text_tokenizer_dir)
    assert done.returncode == 0, done.stderr
    *rejects, peak = done.stdout.splitlines()
    assert len(rejects) == len(ALLOCATING)
    assert all("the chat template cannot render it: it needs more than 2 GiB of memory" in line for line in rejects)
    assert int(peak) < 2048, "MiB"


@pytest.mark.parametrize(
    ("die", "end"),
    [
        (lambda: os._exit(9), "ended with exit code 9"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), r"was killed by signal 9 \(SIGKILL\)"),
    ],
    ids=["exit", "signal"],
)
def test_a_template_that_kills_its_process_stops_in_one_line(
    text_tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch, die: Callable[[], None], end: str
) -> None:
    process, render = os.getpid(), template_module.ChatTemplate.render
    dying = lambda *args, **kw: render(*args, **kw) if os.getpid() == process else die()  # noqa: E731
    monkeypatch.setattr(template_module.ChatTemplate, "render", dying)
    remedy = "fix it in the tokenizer folder, or, if .* such as Ray, run it in a new process"
    with pytest.raises(TemplateError, match=f"by the chat template {end}; {remedy}"):
        encoder_of(text_tokenizer_dir, CHATML).length(normalize(PLAIN))


def test_a_process_that_does_not_answer_is_killed() -> None:
    before = multiprocessing.active_children()
    with pytest.raises(TimeoutError):
        call_in_child(time.sleep, 600, seconds=0.1)
    assert multiprocessing.active_children() == before
    assert call_in_child(divmod, 7, 2) == (3, 1)


def test_a_lower_limit_of_memory_stays() -> None:
    code = """
import resource
from tests.internals import memory_limit
resource.setrlimit(resource.RLIMIT_DATA, (1 << 32, 1 << 33))
with memory_limit(1 << 40):
    print(resource.getrlimit(resource.RLIMIT_DATA))
with memory_limit(1 << 20):
    try:
        bytes(1 << 28)
    except MemoryError:
        print("no")
print(resource.getrlimit(resource.RLIMIT_DATA))
"""
    limits = str((1 << 32, 1 << 33))
    assert run_python(code).stdout.splitlines() == [limits, "no", limits]


def test_pack_with_an_endless_template_ends(
    text_tokenizer_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(template_module, "RENDER_LIMIT", 0.2)
    encoder = ChatEncoder.from_pretrained(text_tokenizer_dir)
    encoder.tokenizer.chat_template = CHATML.replace("BODY", ENDLESS)
    encoder.tokenizer.save_pretrained(tmp_path / "tokenizer")
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(one) + "\n" for one in (PLAIN, ODD, PLAIN)))
    arguments: list[Any] = [data, "-o", tmp_path / "out", "--tokenizer", tmp_path / "tokenizer", "--seq-len", 64]
    monkeypatch.setattr(sys, "argv", ["energon-packed", "pack", *map(str, arguments), "--workers", "2"])
    with pytest.raises(SystemExit) as stopped:
        main()
    assert stopped.value.code == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "the chat template did not finish rendering a conversation of 84 characters" in said
    assert "Traceback" not in said


def test_an_alarm_of_the_program_and_other_threads_are_left_alone() -> None:
    rung = []
    before = signal.signal(signal.SIGVTALRM, lambda *_: rung.append(1))
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.05)
        with time_limit(0.01):
            end = time.monotonic() + 20  # the timer counts the time of user code alone
            while not rung and time.monotonic() < end:
                pass
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)  # or it would end the process
        signal.signal(signal.SIGVTALRM, before)
    assert rung == [1]
    found = []

    def other() -> None:
        with time_limit(0.01):
            found.append(signal.getitimer(signal.ITIMER_VIRTUAL)[0])

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [0]
    with pytest.raises(OutOfTime), time_limit(0.05):
        while True:
            pass

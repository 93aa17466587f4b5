"""A chat template that raises costs the record, one that never ends stops the run; both in one line."""

import json
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from energon_packed import ChatEncoder, Reason, RecordError, TemplateError, normalize
from tests.internals import OutOfTime, main, time_limit
from tests.internals import template as template_module

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% if 'odd' in m.content %}BODY{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
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

"""Every format of docs/my-data.md packs with the command on the page, and gives the tokens of hand-made messages.

published.md has the records of datasets as published, and docs/my-data.md the fields of them that are read, one
section for datasets with the same fields. EXPECTED has what a person would expect the published records to become,
and SECTIONS the published records whose content each section of the page has.
"""

import contextlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from energon_packed import ChatEncoder, Conversation, MediaReference, Message, PackedDataset
from tests.docs.record_pages import PAGE, PUBLISHED, Entry, entries, image_bytes, write_files
from tests.internals import cli, write_tokenizer

TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n# Tools' }}{% for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['reasoning_content'] %}{{ '<think>\n' + message['reasoning_content'] + '\n</think>\n' }}{% endif %}"
    "{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ '\n<tool_call>' + call['function'] | tojson + '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SHOWN, ENTRIES = entries(PAGE), entries(PUBLISHED)
REJECTED = "Clips of videos, remote images, trees"

S, U, A, T = ("system", "user", "assistant", "tool")
RAIN = [(U, "What is rain?"), (A, "Water.")]
SNOW = [(U, "And snow?"), (A, "Frozen water.")]
PARIS = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"name": "get_weather", "description": "Weather of a city", "parameters": CITY}
XLAM = {**WEATHER, "parameters": {"city": {"description": "The city", "type": "str", "default": "London"}}}
BYTES = ""  # the name of an image that has none

Turns = list[tuple[Any, ...]]
# title: for each record, turns (role, content, then weight, calls or other fields) or a document, and its images
EXPECTED: dict[str, list[tuple[Turns | str, list[Any]]]] = {
    "Alpaca": [
        ([(U, "Identify the odd one out.\n\nTwitter, Instagram, Telegram"), (A, "Telegram")], []),
        ([(U, "Give three tips for staying healthy."), (A, "1. Eat a balanced diet.")], []),
    ],
    "Alpaca, from the Hub": [([(U, "Add 2 and 3."), (A, "5")], [])],
    "LLaMA-Factory: alpaca": [
        ([(S, "You are a guide."), (U, "What in summer?"), (A, "Hiking."), (U, "And in winter?"), (A, "Skiing.")], []),
    ],
    "Dolly": [
        ([(U, "When did it start operating?\n\nThe airline commenced services on 31 August 2000."),
          (A, "On 31 August 2000.")], []),
    ],
    "Prompt and completion": [([(U, "The capital of France is"), (A, " Paris.")], [])],
    "Prompt and completion as lists of messages": [
        ([(U, "Hi"), (A, "Hello.", 0), (U, "What color is the sky?"), (A, "Blue.")], []),
    ],
    "FLAN, Aya, xP3": [([(U, "Is the review positive?\nGreat phone."), (A, "yes")], [])],
    "Natural Instructions": [([(U, "Translate to German.\n\nA bus."), (A, "Ein Bus.")], [])],
    "Firefly": [([(U, "Does A follow from B?"), (A, "Yes.")], [])],
    "ms-swift: query, response, history": [
        ([(S, "You are a guide."), (U, "What in summer?"), (A, "Hiking."), (U, "And in winter?"), (A, "Skiing.")], []),
    ],
    "OpenOrca": [([(S, "You are an AI assistant."), (U, "Is the sky blue?"), (A, "Yes.")], [])],
    "Llama-Nemotron post-training": [
        ([(S, "detailed thinking on"), (U, "What is 2 + 2?"), (A, "<think>\nEasy.\n</think>\n4")], []),
    ],
    "OpenAI fine-tuning": [
        ([(S, "Marv is sarcastic."), (U, "Capital of France?"), (A, "Paris", 0), (U, "More sarcastic?"),
          (A, "Paris, as if everyone did not know.")], []),
    ],
    "UltraChat 200k, No Robots": [(RAIN, [])],
    "Tülu 3, SmolTalk, Nemotron v2": [(RAIN, [])],
    "ShareGPT (Vicuna)": [([(U, "Summarize it."), (A, "It is short.")], [])],
    "OpenHermes 2.5": [([(U, "Ann is tall. Is Ann short?"), (A, "No.")], [])],
    "SlimOrca": [([(S, "You are an AI assistant."), (U, "Is the sky blue?"), (A, "Yes.")], [])],
    "Magpie": [(RAIN, [])],
    "WildChat": [([(U, "Hey there."), (A, "Hello.")], [])],
    "LMSYS-Chat-1M": [([(U, "Hey there."), (A, "Hello.")], [])],
    "UltraChat, raw": [([*RAIN, *SNOW], [])],
    "LIMA": [(RAIN, [])],
    "Capybara": [([*RAIN, *SNOW], [])],
    "Orca AgentInstruct": [([(S, ""), *RAIN], [])],
    "OpenAssistant Guanaco": [("### Human: What is rain?### Assistant: Water.", [])],
    "Gemini, Vertex": [([(S, "Be brief."), (U, "What is it?<image>"), (A, "A bus.")], [BYTES])],
    "Anthropic, Bedrock": [([(S, "Be brief."), (U, "<image>What is it?"), (A, "A bus.")], [BYTES])],
    "GSM8K": [
        ([(U, "Ann has 2 apples and buys 3. How many?"), (A, "2 + 3 = <<2+3=5>>5\n#### 5")], []),
    ],
    "MetaMathQA": [([(U, "What is 2 + 3?"), (A, "5. The answer is: 5")], [])],
    "NuminaMath, OpenR1-Math": [([(U, "What is 2 + 3?"), (A, "$\\boxed{5}$")], [])],
    "Problem and solution": [([(U, "What is 2 + 3?"), (A, "5")], [])],
    "OpenThoughts": [
        ([(S, "Think first."), (U, "What is 2 + 3?"),
          (A, "<|begin_of_thought|>\n\nEasy.\n\n<|end_of_thought|>\n\n5")], []),
    ],
    "s1K": [
        ([(U, "What is 2 + 3?"), (A, "It is 5.", {"reasoning_content": "Easy."})], []),
        ([(U, "What is 3 + 3?"), (A, "It is 6.", {"reasoning_content": "Easy."})], []),
    ],
    "medical-o1": [
        ([(U, "What is anemia?"),
          (A, "A lack of red blood cells.", {"reasoning_content": "It is about blood."})], []),
    ],
    "MMLU, ARC, CommonsenseQA, MedQA": [
        ([(U, "Which is a fruit?\nA. Stone\nB. Apple\nC. Chair\nD. Car"), (A, "B. Apple")], []),
    ],
    "SQuAD": [([(U, "Rain is water.\n\nWhat is rain?"), (A, "water")], [])],
    "RACE, DROP": [([(U, "Rain is water.\n\nRain is _ .\nA. dry\nB. water"), (A, "B. water")], [])],
    "OpenAI tools": [
        ([(U, "Weather in Paris?"), (A, "", [PARIS]), (T, "Sunny"), (A, "It is sunny."), {"tools": [WEATHER]}], []),
    ],
    "LLaMA-Factory: sharegpt with tools, APIGen-MT": [
        ([(S, "Be brief."), (U, "Weather in Paris?"), (A, "", [PARIS]), (T, '{"weather": "Sunny"}'),
          (A, "It is sunny."), {"tools": [WEATHER]}], []),
    ],
    "LLaMA-Factory 1.0": [
        ([(U, "Weather in Paris?", 0), (A, "", {"reasoning_content": "I need a tool.", "tool_calls": [PARIS]}),
          (T, '{"weather": "Sunny"}'), (A, "It is sunny.", 0.5), {"tools": [WEATHER]}], []),
        ([(U, "<image>Who are they?"), (A, "Two players.")], ["mllm_demo_data/1.jpg"]),
    ],
    "xLAM": [([(U, "Weather in Paris?"), (A, "", [PARIS]), {"tools": [XLAM]}], [])],
    "Glaive function calling v2": [
        ([(S, "You are a helpful assistant with access to the following functions. Use them if required -\n"
           '{"name": "get_weather"}'),
          (U, "Weather in Paris?"),
          (A, """<functioncall> {"name": "get_weather", "arguments": '{"city": "Paris"}'}"""),
          (T, '{"weather": "Sunny"}'), (A, "It is sunny.")], []),
    ],
    "ToolACE": [
        ([(S, 'Here is a list of functions: [{"name": "get_weather"}]'), (U, "Weather in Paris?"),
          (A, '[get_weather(city="Paris")]'), (T, '[{"weather": "Sunny"}]'), (A, "It is sunny.")], []),
    ],
    "Hermes function calling": [
        ([(S, 'You may call functions. <tools> [{"type": "function", "function": {"name": "get_weather"}}] </tools>'),
          (U, "Weather in Paris?"),
          (A, '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n')], []),
    ],
    "LLaVA-Instruct, ShareGPT4V, Bunny, ALLaVA": [
        ([(U, "<image>\nWhat are the colors of the bus?"), (A, "White and red.")], ["coco/000000033471.jpg"]),
        ([(U, "Hi"), (A, "Hello.")], []),
    ],
    "LLaVA-Pretrain": [
        ([(U, "Render a clear and concise summary of the photo.\n<image>"),
          (A, "select luxury furniture 3 - inch gel memory foam mattress topper")], ["00453/004539375.jpg"]),
    ],
    "LLaVA-OneVision-Data, LLaVA-NeXT-Data": [
        ([(U, "<image>\nWhat is it?"), (A, "A bus.")], ["000000033471.jpg"]),
    ],
    "M4-Instruct, several images": [
        ([(U, "<image>\n<image>\nCompare."), (A, "One is red.")], ["a/0.jpg", "a/1.jpg"]),
    ],
    "InternVL": [([(U, "<image>\n<image>\nCompare."), (A, "One is red.")], ["a/0.jpg", "a/1.jpg"])],
    "Qwen-VL": [
        ([(U, "<image>\n<image>\nWhat cities are these?"), (A, "Chongqing and Beijing.")],
         ["assets/mm_tutorial/Chongqing.jpeg", "assets/mm_tutorial/Beijing.jpeg"]),
    ],
    "ms-swift, LLaMA-Factory: messages and images": [
        ([(U, "<image>What is it?"), (A, "A cat.")], ["mllm_demo_data/1.jpg"]),
    ],
    "ms-swift: query with images": [([(U, "<image>What is it?"), (A, "A cat.")], ["1.jpg"])],
    "TRL, typed parts": [([(U, "What is it?\n<image>"), (A, "A cat.")], [BYTES])],
    "OpenAI, image_url": [([(U, "What is it?<image>"), (A, "A cat.")], [BYTES])],
    "Qwen2.5-VL messages": [([(U, "<image>What is it?"), (A, "A cat.")], ["demo/1.jpg"])],
    "Mantis-Instruct": [([(U, "<image> <image> Same?"), (A, "No.")], ["0.jpg", "1.jpg"])],
    "The Cauldron, Docmatix": [([(U, "<image>How many?"), (A, "4."), (U, "Which?"), (A, "B.")], [BYTES])],
    "FineVision": [([(U, "<image>How many?"), (A, "4.")], ["0.png"])],
    "M3IT": [([(U, "<image>Write a caption.\n\nBe brief."), (A, "A bus.")], [BYTES])],
    "LLaVA-Video, frames": [
        ([(U, "<image><image>\nWhat happens?"), (A, "A bus stops.")], ["v_0/000.jpg", "v_0/001.jpg"]),
    ],
    "VQAv2": [([(U, "<image>What color is it?"), (A, "red")], [BYTES])],
    "TextVQA, DocVQA, InfographicVQA, ST-VQA": [([(U, "<image>What is the date?"), (A, "1/8/93")], ["x.png"])],
    "GQA": [([(U, "<image>Is the sky dark?"), (A, "yes")], ["2354786.jpg"])],
    "ChartQA": [([(U, "<image>How many bars?"), (A, "14")], [BYTES])],
    "ScienceQA": [
        ([(U, "<image>See the map.\n\nWhich is farthest north?\nA. Maine\nB. Utah"), (A, "A. Maine")], ["image.png"]),
    ],
    "AI2D": [([(U, "<image>Which letter is the root?\nA. c\nB. a\nC. b\nD. d"), (A, "C. b")], ["0.png"])],
    "A-OKVQA": [
        ([(U, "<image>What is the man by the bags awaiting?\nA. skateboarder\nB. train\nC. delivery\nD. cab"),
          (A, "D. cab")], [BYTES]),
    ],
    "COCO-Caption": [([(U, "<image>Caption the image."), (A, "Two men in a yard.")], [BYTES])],
    "COCO captions, as published": [
        ([(U, "<image>"), (A, "A black Honda motorcycle.")], ["000000179765.jpg"]),
        ([(U, "<image>"), (A, "A motorcycle in a garage.")], ["000000179765.jpg"]),
    ],
    "TextCaps": [([(U, "<image>"), (A, "A bus with the number 7.")], ["train/0054c91397f2fe05.jpg"])],
    "Flickr30k": [([(U, "<image>"), (A, "Two men in a yard.")], ["1000092795.jpg"])],
    "PixMo-Cap, PixMo-AskModelAnything": [([(U, "<image>"), (A, "Two men in a yard.")], ["pixmo/0.jpg"])],
    "Image and caption, image and text": [
        ([(U, "<image>"), (A, "Two men in a yard.")], ["photos/1.jpg"]),
        ([(U, "<image>"), (A, "A red bus.")], ["photos/2.jpg"]),
    ],
    "CC12M, LAION, DataComp: img2dataset tars": [
        ([(U, "<image>"), (A, "Two men in a yard.")], ["000000000.jpg"]),
        ([(U, "<image>"), (A, "A red bus.")], ["000000001.jpg"]),
    ],
    "Tars with conversations": [([(U, "<image>\nWhat is it?"), (A, "A bus.")], ["000000033471.jpg"])],
    "imagefolder": [
        ([(U, "<image>"), (A, "Two men in a yard.")], ["0001.png"]),
        ([(U, "<image>"), (A, "A red bus.")], ["0002.png"]),
    ],
    "Prompts and captions": [([(U, "<image>What is it?"), (A, "A cat.")], ["photos/1.jpg"])],
    "C4, FineWeb, RedPajama, The Pile, Wikipedia": [("Beginners BBQ Class Taking Place in Missoula!", [])],
    "StarCoder, The Stack": [("def add(a, b):\n    return a + b\n", [])],
    "OBELICS, MINT-1T, OmniCorpus": [
        ("<image>\nThe right to a trial.\n<image>", ["img/0.jpg", "img/1.jpg"]),
    ],
    "mmc4": [("Day one. <image> We saw a bus.", ["b9040a0dbb22.jpg"])],
    "CSV, TSV": [(RAIN, [])],
    "A folder of parts": [(RAIN, []), ([(U, "What is snow?"), (A, "Frozen water.")], [])],
    "save_to_disk": [(RAIN, [])],
    "Lists of datasets: LLaVA-NeXT, lmms-engine, axolotl, InternVL": [
        ([(U, "<image>\nWhat is it?"), (A, "A cat.")], ["1.jpg"]),
    ],
}  # fmt: skip


def of(title: str, *images: str) -> list[tuple[Turns | str, list[str]]]:
    """What a published record becomes; `images` are those that the page names in place of bytes."""
    return [(turns, list(images) or named) for turns, named in EXPECTED[title]]


SECTIONS: dict[str, list[tuple[Turns | str, list[Any]]]] = {
    "Alpaca, Code Alpaca, WizardLM Evol-Instruct, Vision-Flan, LLaMA-Factory": [
        of("Alpaca")[0], *of("LLaMA-Factory: alpaca"),
    ],
    "Dolly": of("Dolly"),
    "Prompt and completion: TRL, FLAN, Aya, xP3, Firefly, Natural Instructions": [
        *of("Prompt and completion"), *of("FLAN, Aya, xP3"), *of("Natural Instructions"), *of("Firefly"),
        *of("Prompt and completion as lists of messages"),
    ],
    "Query and response: ms-swift, MetaMathQA, OpenOrca": [
        *of("MetaMathQA"), *of("ms-swift: query, response, history"), *of("OpenOrca"),
    ],
    "Llama-Nemotron post-training": of("Llama-Nemotron post-training"),
    "Messages: OpenAI fine-tuning, UltraChat 200k, No Robots, Tülu 3, SmolTalk, Nemotron v2, Orca AgentInstruct":
        of("OpenAI fine-tuning"),
    "ShareGPT: Vicuna, OpenHermes 2.5, SlimOrca, Magpie, OpenThoughts": of("SlimOrca"),
    "WildChat, LMSYS-Chat-1M": of("LMSYS-Chat-1M"),
    "UltraChat (raw strings), LIMA, Capybara": [*of("UltraChat, raw"), *of("LIMA"), *of("Capybara")],
    "OpenAssistant Guanaco": of("OpenAssistant Guanaco"),
    "Gemini, Vertex": of("Gemini, Vertex"),
    "Anthropic, Bedrock": of("Anthropic, Bedrock"),
    "GSM8K, SQuAD, RACE, DROP, MMLU, ARC, CommonsenseQA, MedQA": [
        *of("GSM8K"), *of("SQuAD"), *of("RACE, DROP"), *of("MMLU, ARC, CommonsenseQA, MedQA"),
    ],
    "NuminaMath, OpenR1-Math, Magicoder OSS-Instruct": of("Problem and solution"),
    "s1K, s1K-1.1, medical-o1": [*of("s1K"), *of("medical-o1")],
    "OpenAI tools": of("OpenAI tools"),
    "LLaMA-Factory: sharegpt with tools, APIGen-MT": of("LLaMA-Factory: sharegpt with tools, APIGen-MT"),
    "LLaMA-Factory 1.0": of("LLaMA-Factory 1.0")[1:],
    "xLAM": of("xLAM"),
    "Glaive function calling v2": [
        ([(S, 'You may call {"name": "get_weather"}'), *of("Glaive function calling v2")[0][0][1:]], []),
    ],
    "ToolACE, Hermes function calling": of("ToolACE"),
    "LLaVA-Instruct, LLaVA-Pretrain, LLaVA-OneVision-Data, LLaVA-NeXT-Data, ShareGPT4V, Bunny, ALLaVA, M4-Instruct, "
    "InternVL": [*of("LLaVA-Instruct, ShareGPT4V, Bunny, ALLaVA"), *of("M4-Instruct, several images")],
    "Qwen-VL": of("Qwen-VL"),
    "Messages with images: ms-swift, LLaMA-Factory, TRL, Qwen2.5-VL, OpenAI, Mantis-Instruct": [
        *of("ms-swift, LLaMA-Factory: messages and images"), *of("Qwen2.5-VL messages"), *of("OpenAI, image_url"),
        *of("ms-swift: query with images"),
    ],
    "Boxes and image limits: ms-swift, Qwen2.5-VL": [
        ([(U, "<image>Where is the <|object_ref_start|>cat<|object_ref_end|>?"),
          (A, "<|box_start|>(35,42),(140,84)<|box_end|>")], ["1.jpg"]),
        ([(U, "<image>What is it?"), (A, "A cat.")], [("2.jpg", {"max_pixels": 3136})]),
        ([(U, "<image>What is it?"), (A, "A cat.")], [("3.jpg", {"resized_height": 56, "resized_width": 84})]),
    ],
    "The Cauldron, Docmatix, FineVision": of("The Cauldron, Docmatix"),
    "M3IT": of("M3IT"),
    "LLaVA-Video, frames": of("LLaVA-Video, frames"),
    "VQAv2, TextVQA, DocVQA, InfographicVQA, ST-VQA, ChartQA": [
        *of("VQAv2", "1.jpg"), *of("TextVQA, DocVQA, InfographicVQA, ST-VQA"), *of("ChartQA", "2.jpg"),
    ],
    "GQA": of("GQA"),
    "ScienceQA, AI2D, A-OKVQA": [*of("ScienceQA"), *of("AI2D"), *of("A-OKVQA", "1.jpg")],
    "Image and caption: COCO-Caption, Flickr30k, PixMo-Cap, PixMo-AskModelAnything":
        of("Image and caption, image and text"),
    "COCO captions, as published": of("COCO captions, as published"),
    "TextCaps": of("TextCaps"),
    "CC12M, LAION, DataComp: img2dataset tars": [
        of("CC12M, LAION, DataComp: img2dataset tars")[0], *of("Tars with conversations"),
    ],
    "imagefolder": of("imagefolder"),
    "LLaVA-OneVision-2: prompts and captions": of("Prompts and captions"),
    "C4, FineWeb, RedPajama, The Pile, Wikipedia, StarCoder, The Stack": [
        *of("C4, FineWeb, RedPajama, The Pile, Wikipedia"), *of("StarCoder, The Stack"),
    ],
    "OBELICS, MINT-1T, OmniCorpus, mmc4": [*of("OBELICS, MINT-1T, OmniCorpus"), *of("mmc4")],
    "CSV, TSV": of("CSV, TSV"),
    "A folder": of("save_to_disk"),
    "Other field names": [([(U, "<image>What is it?"), (A, "A cat.")], ["photos/1.jpg"])],
    "Everything else": [(RAIN, [])],
    "Several datasets, each with its own field names": [
        *[([(U, "Add 2 and 3."), (A, "5")], [])] * 2,
        ([(U, "<image>What is it?"), (A, "A cat.")], ["1.jpg"]),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A working directory with the tokenizer DIR, whose template has a place for tools and calls."""
    folder = tmp_path_factory.mktemp("formats")
    write_tokenizer(folder / "DIR", [entry.title for entry in ENTRIES.values()])
    config = json.loads((folder / "DIR" / "tokenizer_config.json").read_text())
    assert "chat_template" in config or (folder / "DIR" / "chat_template.jinja").exists()
    (folder / "DIR" / "chat_template.jinja").write_text(TEMPLATE)
    with contextlib.chdir(folder):
        yield folder


@pytest.fixture(scope="module")
def encoder(folder: Path) -> ChatEncoder:
    return ChatEncoder.from_pretrained(folder / "DIR")


@pytest.mark.parametrize("title", EXPECTED)
def test_published_records_pack_as_a_person_expects(title: str, folder: Path, encoder: ChatEncoder) -> None:
    check(ENTRIES[title], EXPECTED[title], folder, encoder)


@pytest.mark.parametrize("title", SECTIONS)
def test_page_packs_what_a_person_expects(title: str, folder: Path, encoder: ChatEncoder) -> None:
    check(SHOWN[title], SECTIONS[title], folder, encoder)


@pytest.mark.parametrize("entry", [SHOWN["Tokens"], ENTRIES["input_ids"]], ids=["page", "published"])
def test_tokens_without_their_padding(entry: Entry, folder: Path, encoder: ChatEncoder) -> None:
    run(entry, folder)
    (pack,) = PackedDataset(entry.output, encoder)
    assert [tokens(one) for one in pack] == [([11, 12, 13], [-100, 12, 13])]


def test_rejects_have_the_reason_and_the_remedy(folder: Path) -> None:
    entry = ENTRIES[REJECTED]
    write_files(entry, folder)
    done = CliRunner().invoke(cli, [*shlex.split(entry.command)[1:], "--quiet"])
    assert done.exit_code == 1
    lines = (folder / entry.output / "rejects.jsonl").read_text().splitlines()
    found = [f"{reject['reason']}: {reject['detail']}" for reject in map(json.loads, lines)]
    assert found == entry.rejects.splitlines()


def test_every_format_is_tested_and_on_the_page() -> None:
    assert set(SHOWN) == {*SECTIONS, "Tokens"}
    assert set(ENTRIES) == {*EXPECTED, "input_ids", REJECTED}
    assert len(EXPECTED) >= 60
    page = PAGE.read_text(encoding="utf-8").lower()
    names = {name for title in EXPECTED for name in re.findall(r"[\w.-]*[A-Z0-9][\w.-]*", title)}
    assert not [name for name in names if name.lower() not in page]


def check(entry: Entry, expected: list[tuple[Turns | str, list[Any]]], folder: Path, encoder: ChatEncoder) -> None:
    """Run the command, and compare its packs with the conversations that a person wrote by hand."""
    run(entry, folder)
    found = [sample for pack in PackedDataset(entry.output, encoder) for sample in pack]
    samples = [encoder.encode(conversation(turns, images)) for turns, images in expected]
    assert sorted(tokens(one) for one in found) == sorted(tokens(one) for one in samples)
    assert sorted(pixels(one) for one in found) == sorted(pixels(one) for one in samples)


def run(entry: Entry, folder: Path) -> None:
    """The command of the page, in this process."""
    write_files(entry, folder)
    program, *arguments = shlex.split(entry.command)
    assert program == "energon-packed"
    done = CliRunner().invoke(cli, [*arguments, "--workers", "1"], catch_exceptions=False)
    assert done.exit_code == 0, done.output


def conversation(turns: Turns | str, images: list[Any]) -> Conversation:
    """What a person would write by hand for a record."""
    references = tuple(
        MediaReference(data=image_bytes(image))
        if isinstance(image, str)
        else MediaReference(data=image_bytes(image[0]), settings=image[1])
        for image in images
    )
    if isinstance(turns, str):
        return Conversation(text=turns, images=references)
    tools = next((turn["tools"] for turn in turns if isinstance(turn, dict)), None)
    return Conversation(
        messages=tuple(_message(*turn) for turn in turns if not isinstance(turn, dict)),
        images=references,
        tools=None if tools is None else [{"type": "function", "function": tool} for tool in tools],
    )


def _message(role: str, content: str, more: Any = 1) -> Message:
    if isinstance(more, list):
        return Message(role, content, {"tool_calls": more})
    if isinstance(more, dict):
        return Message(role, content, more)
    return Message(role, content, weight=float(more))


def tokens(sample: Any) -> tuple[list[int], list[int]]:
    return sample.input_ids.tolist(), sample.labels.tolist()


def pixels(sample: Any) -> float:
    return 0.0 if sample.pixel_values is None else float(np.abs(sample.pixel_values.numpy()).sum())

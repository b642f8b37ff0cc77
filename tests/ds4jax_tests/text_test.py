"""Prompt encoding against strings written out by hand from the published encoder's rules."""

import json
import pathlib
import sys

import numpy as np
import pytest

from ds4jax import testing, text
from ds4jax.run_config import PromptConfig

BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SYSTEM = {"role": "system", "content": "Be brief."}
TWO_TURNS = [
    SYSTEM,
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "reasoning_content": "They greet.", "content": "Hi!"},
    {"role": "user", "content": "Capital of France?"},
]
ANSWERED = [*TWO_TURNS, {"role": "assistant", "reasoning_content": "Easy.", "content": "Paris."}]
TOOLS = [
    {
        "type": "function",
        "function": {"name": "look", "parameters": {"type": "object", "properties": {"é": {}}}},
    }
]


def call(identifier: str, arguments: str, name: str = "look") -> dict:
    return {"id": identifier, "function": {"name": name, "arguments": arguments}}


@pytest.mark.parametrize(
    ("messages", "thinking", "expected"),
    [
        pytest.param(
            [{"role": "user", "content": "Hello"}],
            False,
            f"{BEGIN}<｜User｜>Hello<｜Assistant｜></think>",
            id="chat",
        ),
        pytest.param(
            [{"role": "user", "content": "Hello"}],
            True,
            f"{BEGIN}<｜User｜>Hello<｜Assistant｜><think>",
            id="thinking",
        ),
        pytest.param(
            TWO_TURNS,
            False,
            f"{BEGIN}Be brief.<｜User｜>Hello<｜Assistant｜></think>Hi!{END}"
            "<｜User｜>Capital of France?<｜Assistant｜></think>",
            id="chat, two turns",
        ),
        pytest.param(
            TWO_TURNS,
            True,
            f"{BEGIN}Be brief.<｜User｜>Hello<｜Assistant｜></think>Hi!{END}"
            "<｜User｜>Capital of France?<｜Assistant｜><think>",
            id="thinking drops the reasoning of earlier turns",
        ),
        pytest.param(
            ANSWERED,
            True,
            f"{BEGIN}Be brief.<｜User｜>Hello<｜Assistant｜></think>Hi!{END}"
            f"<｜User｜>Capital of France?<｜Assistant｜><think>Easy.</think>Paris.{END}",
            id="thinking keeps the reasoning of the last turn",
        ),
        pytest.param(
            [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}],
            False,
            f"{BEGIN}<｜User｜>a\n\nb<｜Assistant｜></think>",
            id="neighbouring user messages are one turn",
        ),
        pytest.param(
            [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
            False,
            f"{BEGIN}<｜User｜>a<｜Assistant｜></think>",
            id="content as blocks",
        ),
        pytest.param([SYSTEM], False, f"{BEGIN}Be brief.", id="system alone"),
    ],
)
def test_golden_prompts(messages, thinking, expected):
    assert text.encode_messages(messages, thinking=thinking) == expected


def test_tools_stand_in_the_system_message_and_keep_all_reasoning():
    messages = [{**SYSTEM, "tools": TOOLS}, *ANSWERED[1:]]
    encoded = text.encode_messages(messages, thinking=True)
    assert encoded.startswith(f"{BEGIN}Be brief.\n\n## Tools\n\nYou have access to a set of tools")
    schema = '{"name": "look", "parameters": {"type": "object", "properties": {"é": {}}}}'
    assert f"### Available Tool Schemas\n\n{schema}\n\nYou MUST strictly follow" in encoded
    assert encoded.endswith(
        "to invoke tool calls.\n<｜User｜>Hello<｜Assistant｜><think>They greet.</think>Hi!"
        f"{END}<｜User｜>Capital of France?<｜Assistant｜><think>Easy.</think>Paris.{END}"
    )


def test_tool_calls_and_their_results():
    messages = [
        {"role": "user", "content": "Look."},
        {
            "role": "assistant",
            "reasoning_content": "I look.",
            "content": "Looking.",
            "tool_calls": [
                call("c1", '{"place": "here", "depth": 2, "all": true}'),
                call("c2", "not json"),
            ],
        },
        {"role": "tool", "tool_call_id": "c2", "content": "two"},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "one"}]},
        {"role": "user", "content": "And?"},
    ]
    assert text.encode_messages(messages, thinking=False) == (
        f"{BEGIN}<｜User｜>Look.<｜Assistant｜></think>Looking.\n\n"
        "<｜DSML｜tool_calls>\n"
        '<｜DSML｜invoke name="look">\n'
        '<｜DSML｜parameter name="place" string="true">here</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="depth" string="false">2</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="all" string="false">true</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        '<｜DSML｜invoke name="look">\n'
        '<｜DSML｜parameter name="arguments" string="true">not json</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n"
        f"</｜DSML｜tool_calls>{END}"
        "<｜User｜><tool_result>one</tool_result>\n\n<tool_result>two</tool_result>\n\nAnd?"
        "<｜Assistant｜></think>"
    )


@pytest.mark.parametrize(
    ("texts", "effort", "expected"),
    [
        ("original", "none", ""),
        ("original", "high", ""),
        ("original", "max", "Reasoning Effort: Absolute maximum"),
        ("0731", "none", ""),
        ("0731", "high", "Reasoning Effort: Absolute maximum"),
        ("0731", "max", "Reasoning Effort: Beyond maximum"),
    ],
)
def test_effort_paragraph_follows_the_begin_mark_of_thinking_prompts(texts, effort, expected):
    def encode(thinking: bool) -> str:
        messages = [{"role": "user", "content": "x"}]
        return text.encode_messages(messages, thinking=thinking, effort=effort, effort_texts=texts)

    paragraph = encode(True).removeprefix(BEGIN).removesuffix("<｜User｜>x<｜Assistant｜><think>")
    assert paragraph.startswith(expected)
    assert bool(paragraph) == bool(expected)
    assert not expected or paragraph.endswith(".\n\n")
    assert encode(False) == f"{BEGIN}<｜User｜>x<｜Assistant｜></think>"


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], "the conversation has no message"),
        ([{"role": "robot", "content": ""}], "role 'robot', expected system, user, assistant"),
        ([{"role": "user", "content": 3}], "a user message has content 3, expected text"),
        ([{"role": "user", "content": [{"type": "image"}]}], "reads no images"),
    ],
)
def test_conversations_that_cannot_be_encoded(messages, expected):
    with pytest.raises(text.PromptError, match=expected):
        text.encode_messages(messages, thinking=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    (folder / "tokenizer.json").write_text(testing.byte_tokenizer(), encoding="utf-8")
    return folder


def test_tokenizer_takes_marks_whole_and_text_by_the_byte(folder):
    tokenizer = text.Tokenizer(folder)
    ids = tokenizer.encode(f"{BEGIN}<｜User｜>é<｜Assistant｜><think>{END}")
    marks = [testing.SPECIAL_TOKENS.index(mark) for mark in (BEGIN, "<｜User｜>")]
    assert ids.dtype == np.int32
    assert list(ids[:2]) == marks
    assert list(ids[2:4]) == [len(testing.SPECIAL_TOKENS) + byte for byte in "é".encode()]
    assert len(ids) == 7
    assert tokenizer.decode(ids) == f"{BEGIN}<｜User｜>é<｜Assistant｜><think>{END}"
    assert len(tokenizer.encode("x")) == 1  # adds no begin mark by itself


def test_missing_tokenizer_is_named_with_the_way_around(tmp_path):
    with pytest.raises(text.PromptError, match=r"tokenizer\.json does not exist.*--tokens"):
        text.Tokenizer(tmp_path)


def test_damaged_and_foreign_tokenizers_are_named(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text("{}")
    with pytest.raises(text.PromptError, match=r"tokenizer\.json is not a tokenizer"):
        text.Tokenizer(tmp_path)
    foreign = testing.byte_tokenizer().replace("<think>", "<ponder>")
    path.write_text(foreign, encoding="utf-8")
    with pytest.raises(text.PromptError, match="has no token <think>"):
        text.Tokenizer(tmp_path)


def test_missing_package_is_named_with_its_extra(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(text.PromptError, match=r"pip install 'ds4jax\[text\]'"):
        text.Tokenizer(folder)


def read(folder: pathlib.Path, **values) -> list[text.Prompt]:
    return text.read_prompts(PromptConfig(**values), lambda: text.Tokenizer(folder))


def decoded(folder: pathlib.Path, **values) -> list[str]:
    return [text.Tokenizer(folder).decode(prompt.ids) for prompt in read(folder, **values)]


def test_forms_of_a_text_prompt(folder):
    assert decoded(folder, text=("Hi", f"{BEGIN}Hi")) == [f"{BEGIN}Hi"] * 2
    assert decoded(folder, text=("Hi",), form="chat") == [
        f"{BEGIN}<｜User｜>Hi<｜Assistant｜></think>"
    ]
    (thinking,) = decoded(folder, text=("Hi",), form="thinking", effort="max")
    assert thinking.startswith(f"{BEGIN}Reasoning Effort: Absolute")
    assert thinking.endswith("<｜User｜>Hi<｜Assistant｜><think>")


def test_lines_of_a_prompts_file(folder, tmp_path):
    lines = [
        {"text": "a", "name": "first"},
        {"messages": [SYSTEM, {"role": "user", "content": "b"}]},
        {"messages": [{"role": "user", "content": "c"}], "tools": TOOLS},
        {"tokens": [3, 1]},
    ]
    path = tmp_path / "p.jsonl"
    path.write_text("\n\n".join(json.dumps(line) for line in lines) + "\n")
    prompts = read(folder, prompts_file=str(path))
    texts = decoded(folder, prompts_file=str(path))
    assert [prompt.name for prompt in prompts] == ["first", *(f"{path}:{n}" for n in (3, 5, 7))]
    assert texts[0] == f"{BEGIN}a"
    assert texts[1] == f"{BEGIN}Be brief.<｜User｜>b<｜Assistant｜></think>"
    assert texts[2].startswith(f"{BEGIN}\n\n## Tools")
    assert list(prompts[3].ids) == [3, 1]


def test_token_files_need_no_tokenizer(tmp_path):
    np.save(tmp_path / "ids.npy", np.array([5, 6], np.int64))
    (prompt,) = read(tmp_path, tokens=str(tmp_path / "ids.npy"))
    assert prompt.ids.dtype == np.int32
    assert list(prompt.ids) == [5, 6]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("", r"p\.jsonl is empty"),
        ("{", r"p\.jsonl:1 is not JSON"),
        ("[]", r"p\.jsonl:1 has .* expected exactly one of text, messages, tokens"),
        ('{"text": "a", "tokens": []}', "expected exactly one of"),
        ('\n{"text": ""}', r"p\.jsonl:2: the prompt is empty"),
        ('{"text": 3}', r"p\.jsonl:1 is not of the form of a prompt .* text as a string"),
        ('{"messages": 3}', r"p\.jsonl:1 is not of the form .* messages as a list"),
        (
            '{"messages": [{"role": "user", "content": "x"}], "tools": "no"}',
            r"p\.jsonl:1 is not of the form .* tools as a list",
        ),
        ('{"tokens": [[1]]}', r"p\.jsonl:1: the token ids are int64 of shape \[1, 1\]"),
        ('{"tokens": [[1], [2, 3]]}', r"p\.jsonl:1: tokens is not flat"),
        ('{"tokens": [-1]}', "reach from -1 to -1"),
        ('{"messages": [{"role": "x"}]}', r"p\.jsonl:1: a message has the role 'x'"),
        ("\xff\xfe", r"p\.jsonl is not UTF-8"),
        ("[" * 100_000, r"p\.jsonl:1 is not JSON"),
        ('{"tokens": [' + "1" * 5000 + "]}", r"p\.jsonl:1 is not JSON"),
    ],
)
def test_bad_lines_are_named(folder, tmp_path, content, expected):
    path = tmp_path / "p.jsonl"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(text.PromptError, match=expected):
        read(folder, prompts_file=str(path))


def test_missing_prompts_and_files_are_named(folder, tmp_path):
    with pytest.raises(text.PromptError, match="no prompt: give one of --prompt=TEXT"):
        read(folder)
    with pytest.raises(text.PromptError, match=r"no\.txt cannot be read \(No such file"):
        read(folder, file=str(tmp_path / "no.txt"))
    with pytest.raises(text.PromptError, match=r"no\.npy cannot be read \(No such file"):
        read(folder, tokens=str(tmp_path / "no.npy"))
    for content in (b"not an array", b""):
        (tmp_path / "bad.npy").write_bytes(content)
        with pytest.raises(text.PromptError, match=r"bad\.npy is no \.npy file of numbers .*save"):
            read(folder, tokens=str(tmp_path / "bad.npy"))
    with open(tmp_path / "bad.npy", "wb") as file:
        header = {"descr": "<i4", "fortran_order": False, "shape": (10**15,)}
        np.lib.format.write_array_header_1_0(file, header)
    with pytest.raises(text.PromptError, match=r"bad\.npy is no \.npy file .*Unable to allocate"):
        read(folder, tokens=str(tmp_path / "bad.npy"))
    np.save(tmp_path / "bad.npy", np.array([0.5]))
    with pytest.raises(text.PromptError, match=r"bad\.npy: the token ids are float64"):
        read(folder, tokens=str(tmp_path / "bad.npy"))

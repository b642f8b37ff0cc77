"""Text in: the checkpoint's tokenizer, the prompt encoding of DeepSeek-V4, and prompt files.

The published models come without a chat template; their prompts are defined by the encoder that
is published with the weights. `encode_messages` gives the same strings for system, user,
assistant and tool messages. Its marks are single tokens of the tokenizer; the tokenizer itself
adds none.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ds4jax.run_config import PromptConfig

BEGIN = "<｜begin▁of▁sentence｜>"
END = "<｜end▁of▁sentence｜>"
USER = "<｜User｜>"
ASSISTANT = "<｜Assistant｜>"
THINK = "<think>"
END_THINK = "</think>"
_DSML = "｜DSML｜"

_TOOLS_TEXT = f"""## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by \
writing a "<{_DSML}tool_calls>" block like the following:

<{_DSML}tool_calls>
<{_DSML}invoke name="$TOOL_NAME">
<{_DSML}parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</{_DSML}parameter>
...
</{_DSML}invoke>
<{_DSML}invoke name="$TOOL_NAME2">
...
</{_DSML}invoke>
</{_DSML}tool_calls>

String parameters should be specified as is and set `string="true"`. For all other types \
(numbers, booleans, arrays, objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by {THINK}), you MUST output your complete reasoning \
inside {THINK}...{END_THINK} BEFORE any tool calls or final response.

Otherwise, output directly after {END_THINK} with tool calls or final response.

### Available Tool Schemas

%s

You MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.
"""

_ABSOLUTE_EFFORT = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to "
    "resolve the root cause, rigorously stress-testing your logic against all potential paths, "
    "edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, "
    "considered alternative, and rejected hypothesis to ensure absolutely no assumption is left "
    "unchecked.\n\n"
)
_BEYOND_EFFORT = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: "
    "exhaustively decompose the problem into its most fundamental components, trace every causal "
    "chain to its root, and resolve the underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles "
    "and are certain that no assumption remains unchecked and no error remains undiscovered.\n\n"
)
# The 0731 revision moved the first releases' strongest wording down to "high".
_EFFORT_PARAGRAPHS = {
    "original": {"none": "", "high": "", "max": _ABSOLUTE_EFFORT},
    "0731": {"none": "", "high": _ABSOLUTE_EFFORT, "max": _BEYOND_EFFORT},
}


class PromptError(ValueError):
    """A prompt that cannot be put to the model: names where it came from and what is wrong."""


def encode_messages(
    messages: Sequence[Mapping[str, Any]],
    *,
    thinking: bool,
    effort: str = "none",
    effort_texts: str = "original",
) -> str:
    """The prompt string of a conversation, up to where the assistant has to go on.

    messages  OpenAI-style: role system, user, assistant or tool, with "content". A system message
              may carry "tools"; an assistant message may carry "reasoning_content" and
              "tool_calls"; a tool message names its "tool_call_id".
    thinking  whether the assistant reasons (open <think>) or answers at once (</think>).
    effort    paragraph put first in thinking prompts, see `run_config.PromptConfig`.

    Reasoning of turns before the last user turn is left out unless a message defines tools. Tool
    results have no role of their own: they stand in a user turn, in the order of the calls.

    Raises PromptError for unknown roles and content that is not text.
    """
    turns = _merge_tool_results(messages)
    keep_reasoning = any(turn.get("tools") for turn in turns)
    last_user = max((i for i, turn in enumerate(turns) if turn["role"] == "user"), default=-1)
    parts = [BEGIN]
    if thinking:
        parts.append(_EFFORT_PARAGRAPHS[effort_texts][effort])
    for i, turn in enumerate(turns):
        if turn["role"] == "system":
            parts.append(_text(turn))
            if turn.get("tools"):
                schemas = [_json(tool["function"]) for tool in turn["tools"]]
                parts.append("\n\n" + _TOOLS_TEXT % "\n".join(schemas))
        elif turn["role"] == "user":
            parts.append(USER + "\n\n".join(turn["blocks"]))
            if i + 1 == len(turns) or turns[i + 1]["role"] == "assistant":
                reasons = thinking and (keep_reasoning or i >= last_user)
                parts.append(ASSISTANT + (THINK if reasons else END_THINK))
        else:
            if thinking and (keep_reasoning or i > last_user):
                parts.append((turn.get("reasoning_content") or "") + END_THINK)
            parts.append(_text(turn) + _tool_calls(turn) + END)
    return "".join(parts)


def _merge_tool_results(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages as turns: neighbouring user and tool messages become one user turn of blocks."""
    if not messages:
        raise PromptError("the conversation has no message: expected at least one user message")
    turns: list[dict[str, Any]] = []
    call_order: dict[str, int] = {}
    results: list[tuple[int, int]] = []  # (rank of the call, block index) in the open user turn
    for message in messages:
        role = message.get("role")
        if role not in ("system", "user", "assistant", "tool"):
            raise PromptError(
                f"a message has the role {role!r}, expected system, user, assistant or tool"
            )
        if role in ("system", "assistant"):
            turns.append(dict(message))
            if message.get("tool_calls"):
                call_order = {
                    call["id"]: rank
                    for rank, call in enumerate(message["tool_calls"])
                    if call.get("id")
                }
            continue
        if not turns or turns[-1]["role"] != "user":
            turns.append({"role": "user", "blocks": []})
            results = []
        blocks = turns[-1]["blocks"]
        if role == "user":
            blocks.append(_text(message))
            continue
        results.append((call_order.get(message.get("tool_call_id", ""), 0), len(blocks)))
        blocks.append(f"<tool_result>{_text(message)}</tool_result>")
        # Results take the places that results already have, in the order of their calls.
        places = sorted(place for _, place in results)
        ordered = sorted(results, key=lambda result: result[0])
        texts = [blocks[place] for _, place in ordered]
        for place, text in zip(places, texts, strict=True):
            blocks[place] = text
        results = [(rank, place) for (rank, _), place in zip(ordered, places, strict=True)]
    return turns


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(block, Mapping) and block.get("type") == "text" for block in content
    ):
        return "\n\n".join(block["text"] for block in content)
    raise PromptError(
        f"a {message['role']} message has content {content!r:.80}, expected text (this engine "
        "reads no images)"
    )


def _tool_calls(message: Mapping[str, Any]) -> str:
    if not message.get("tool_calls"):
        return ""
    invocations = []
    for call in message["tool_calls"]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        try:
            values = json.loads(arguments)
        except json.JSONDecodeError:
            values = None
        if not isinstance(values, dict):
            values = {"arguments": arguments}
        lines = [
            f'<{_DSML}parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
            f"{value if isinstance(value, str) else _json(value)}</{_DSML}parameter>"
            for key, value in values.items()
        ]
        invocations.append(
            "\n".join([f'<{_DSML}invoke name="{name}">', *lines, f"</{_DSML}invoke>"])
        )
    return "\n".join(["\n\n" + f"<{_DSML}tool_calls>", *invocations, f"</{_DSML}tool_calls>"])


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


class Tokenizer:
    """The `tokenizer.json` of a checkpoint folder; needs the extra `text`."""

    def __init__(self, folder: str | os.PathLike[str]):
        path = Path(folder) / "tokenizer.json"
        if not path.is_file():
            raise PromptError(
                f"{path} does not exist: text prompts need the tokenizer of the checkpoint; put it "
                "there or pass token ids (--tokens=FILE.npy)"
            )
        try:
            import tokenizers  # an extra: everything but text works without it
        except ImportError:
            raise PromptError(
                "text prompts need the package tokenizers: pip install 'ds4jax[text]', or pass "
                "token ids (--tokens=FILE.npy)"
            ) from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception for every fault
            raise PromptError(f"{path} is not a tokenizer ({error}): fetch it again") from None
        for mark in (BEGIN, END, USER, ASSISTANT, THINK, END_THINK):
            if self._tokenizer.token_to_id(mark) is None:
                raise PromptError(
                    f"{path} has no token {mark}: expected the tokenizer of a DeepSeek-V4 model"
                )

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, [tokens] i32; marks such as <think> become their single token."""
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of `ids`, marks included."""
        return self._tokenizer.decode([int(token) for token in ids], skip_special_tokens=False)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One sequence to read: ids [tokens] i32, and a name for reports."""

    name: str
    ids: np.ndarray


def read_prompts(config: PromptConfig, tokenizer: Callable[[], Tokenizer]) -> list[Prompt]:
    """The prompts that `config` names, as token ids.

    tokenizer is called at most once, and only when there is text.

    Raises PromptError when a file is missing or malformed, naming file and line, and when no
    prompt is given.
    """
    loaded: list[Tokenizer] = []

    def encode(text: str) -> np.ndarray:
        if not loaded:
            loaded.append(tokenizer())
        return loaded[0].encode(text)

    if config.tokens:
        return [Prompt("tokens", _read_tokens(config.tokens))]
    if config.file:
        return [Prompt(Path(config.file).name, encode(_form_text(_read_text(config.file), config)))]
    if config.prompts_file:
        prompts = []
        for number, line in enumerate(_read_text(config.prompts_file).splitlines(), 1):
            if line.strip():
                prompts.append(_read_line(line, f"{config.prompts_file}:{number}", config, encode))
        if not prompts:
            raise PromptError(f"{config.prompts_file} is empty: expected one JSON object a line")
        return prompts
    if config.text:
        return [
            Prompt(f"prompt{i}", encode(_form_text(text, config)))
            for i, text in enumerate(config.text)
        ]
    raise PromptError(
        "no prompt: give one of --prompt=TEXT, --prompt_file=F, --prompts_file=F.jsonl, "
        "--tokens=F.npy, or a [prompt] table in the TOML file"
    )


def _form_text(text: str, config: PromptConfig) -> str:
    if not text:
        raise PromptError("the prompt is empty: expected at least one character")
    if config.form == "text":
        return text if text.startswith(BEGIN) else BEGIN + text
    return _form_messages([{"role": "user", "content": text}], config)


def _form_messages(messages: Sequence[Mapping[str, Any]], config: PromptConfig) -> str:
    return encode_messages(
        messages,
        thinking=config.form == "thinking",
        effort=config.effort,
        effort_texts=config.effort_texts,
    )


def _read_line(
    line: str, where: str, config: PromptConfig, encode: Callable[[str], np.ndarray]
) -> Prompt:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise PromptError(f"{where} is not JSON ({error}): expected one object a line") from None
    kinds = ("text", "messages", "tokens")
    given = [kind for kind in kinds if isinstance(entry, dict) and kind in entry]
    if len(given) != 1:
        raise PromptError(f"{where} has {line!r:.80}, expected exactly one of {', '.join(kinds)}")
    name = str(entry.get("name", where))
    try:
        if given == ["tokens"]:
            return Prompt(name, _token_ids(_array(entry["tokens"])))
        if given == ["text"]:
            return Prompt(name, encode(_form_text(entry["text"], config)))
        messages = list(entry["messages"])
        if entry.get("tools"):
            if not messages or messages[0].get("role") != "system":
                messages.insert(0, {"role": "system"})
            messages[0] = {**messages[0], "tools": entry["tools"]}
        return Prompt(name, encode(_form_messages(messages, config)))
    except PromptError as error:
        raise PromptError(f"{where}: {error}") from None
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise PromptError(
            f"{where} is not of the form of a prompt ({type(error).__name__}: {error}): expected "
            'text as a string, messages as a list of {"role": ..., "content": ...}, tools as a '
            'list of {"type": "function", "function": ...}'
        ) from None


def _array(tokens: Any) -> np.ndarray:
    """A JSON list of token ids as an array; an empty one is refused later, by its name."""
    if tokens == []:
        return np.zeros(0, np.int32)
    try:
        return np.asarray(tokens)
    except ValueError:  # lists of different lengths in the list
        raise PromptError("tokens is not flat, expected one list of whole numbers") from None


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PromptError(f"{path} is not UTF-8 ({error}): convert it first") from None
    except OSError as error:
        raise PromptError(
            f"{path} cannot be read ({error.strerror}): expected a text file"
        ) from None


def _read_tokens(path: str) -> np.ndarray:
    try:
        with open(path, "rb") as file:
            array = np.lib.format.read_array(file, allow_pickle=False)
    except OSError as error:
        raise PromptError(
            f"{path} cannot be read ({error.strerror or error}): expected a .npy file"
        ) from None
    except (ValueError, EOFError, MemoryError) as error:  # a header may announce any size
        raise PromptError(
            f"{path} is no .npy file of numbers ({error}): write it with numpy.save"
        ) from None
    try:
        return _token_ids(array)
    except PromptError as error:
        raise PromptError(f"{path}: {error}") from None


def _token_ids(array: np.ndarray) -> np.ndarray:
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise PromptError(
            f"the token ids are {array.dtype} of shape {list(array.shape)}, expected whole numbers "
            "in one dimension"
        )
    if array.size and not (array.min() >= 0 and array.max() < 2**31):
        raise PromptError(
            f"the token ids reach from {array.min()} to {array.max()}, expected 0 up to the "
            "vocabulary size"
        )
    return array.astype(np.int32)

"""Whether prompts, states and stopped passes are such as an engine can go on with."""

from collections.abc import Collection, Sequence

import jax
import numpy as np

from ds4jax.cache import PausedPass, SequenceState, abstract_state, state_capacity
from ds4jax.config import ConfigError, ModelConfig, Numerics
from ds4jax.costs import padded_rows, row_shapes
from ds4jax.run_config import RunConfig
from ds4jax.text import PromptError


def check_prompt(
    ids: Sequence[int] | np.ndarray,
    name: str,
    before: int,
    model_config: ModelConfig,
    config: RunConfig,
    more: int = 0,
) -> np.ndarray:
    """The token ids as i32, if they can be read.

    before  tokens that the state has read; more  tokens that come after these
    Raises PromptError for ids that are none, outside the vocabulary, or too many.
    """
    tokens = np.asarray(ids)
    if tokens.ndim != 1 or (tokens.size and not np.issubdtype(tokens.dtype, np.integer)):
        raise PromptError(
            f"{name}: the token ids are {tokens.dtype} of shape {list(tokens.shape)}, expected "
            "whole numbers in one dimension"
        )
    if not tokens.size:
        raise PromptError(f"{name} has no tokens: expected at least one to read")
    vocabulary = model_config.vocab_size
    outside = np.flatnonzero((tokens < 0) | (tokens >= vocabulary))
    if outside.size:
        raise PromptError(
            f"{name}: token {outside[0]} has the id {tokens[outside[0]]}, expected 0 to "
            f"{vocabulary - 1}: was the prompt encoded with the tokenizer of another model?"
        )
    end = before + len(tokens) + more
    for limit, key in (
        (model_config.max_position_embeddings, "max_position_embeddings of the model"),
        (config.prefill.max_tokens, "config.prefill.max_tokens"),
    ):
        if limit is not None and end > limit:
            raise PromptError(
                f"{name} ends at position {end}, expected at most {limit} ({key}): shorten it"
            )
    return tokens.astype(np.int32)


def check_state(
    state: SequenceState, model_config: ModelConfig, numerics: Numerics, here: Collection[int]
) -> None:
    """Raises ConfigError unless the arrays of `state` are those of this model and numerics.

    here  the layers whose states it should have: those of this process
    """
    wanted = abstract_state(model_config, numerics, state_capacity(state, model_config))
    layers = tuple(each if n in here else None for n, each in enumerate(wanted.layers))
    found = jax.tree_util.tree_leaves_with_path(state.layers)
    expected = jax.tree_util.tree_leaves_with_path(layers)
    for (path, leaf), (wanted_path, shape) in zip(found, expected, strict=False):
        if path != wanted_path or leaf.shape != shape.shape or leaf.dtype != shape.dtype:
            raise ConfigError(
                f"state: layers{jax.tree_util.keystr(path)} is "
                f"{leaf.dtype}{list(leaf.shape)}, expected layers"
                f"{jax.tree_util.keystr(wanted_path)} {shape.dtype}{list(shape.shape)}: it "
                "belongs to another model or numerics setting"
            )
    if len(found) != len(expected):
        raise ConfigError(
            f"state: has {len(found)} arrays in {len(state.layers)} layers, expected "
            f"{len(expected)} in {len(here)}: it belongs to another model or process"
        )


def check_paused(
    paused: PausedPass, tokens: int, model_config: ModelConfig, config: RunConfig, stages: int
) -> None:
    """Raises ConfigError unless an engine of `stages` stages can go on with `paused`.

    tokens  that are going to be read, those of the pass included
    """
    layers, chunk = model_config.num_hidden_layers, config.prefill.chunk_tokens
    if stages > 1:
        raise ConfigError(
            f"paused: the engine has {stages} stages, a paused pass goes on with "
            "one: resume without config.pipeline.split"
        )
    if not 0 < paused.layer < layers:
        raise ConfigError(
            f"paused: its next layer is {paused.layer}, expected 1..{layers - 1}: it belongs "
            "to another model"
        )
    if max(paused.tokens) > chunk or sum(paused.tokens) > tokens:
        raise ConfigError(
            f"paused: its chunks have {list(paused.tokens)} tokens, expected at most "
            f"config.prefill.chunk_tokens {chunk} each and {tokens} together: resume with the "
            "chunk size and the tokens of the run that was stopped"
        )
    rows = [streams.shape[0] for streams in paused.streams]
    wanted = [padded_rows(length, row_shapes(chunk)) for length in paused.tokens]
    if rows != wanted:
        raise ConfigError(
            f"paused: its chunks of {list(paused.tokens)} tokens have {rows} rows, expected "
            f"{wanted} with config.prefill.chunk_tokens {chunk}: resume with the chunk size of "
            "the run that was stopped"
        )

"""Samples text from a language model: continues a prompt token by token, with cached keys and values.

The input is the last tokens, up to the context length. When that is full, the second half of the context is kept and
grows again. The input is the same with and without cache, so both give the same text, up to rounding.

RUN/samples/step-N-text-seedS.txt    the settings and texts; samples of other settings go to ...-2.txt, ...-3.txt
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unskip import _checks
from unskip._modes import evaluating
from unskip.data import Tokenizer
from unskip.errors import BadInput
from unskip.evals import autocast, token_logits
from unskip.recipes._causal import takes_cache
from unskip.recipes._lm import NextToken, tokenizer_of
from unskip.recipes._open import Trained, open_run


@dataclass(frozen=True, eq=False)
class TextSamples:
    """Continuations of a prompt, without the prompt, and the cost."""

    prompt: str
    texts: list[str]
    tokens: int  # drawn, over all texts
    seconds: float
    file: Path | None


def sample_text(
    run: str | Path | Trained,
    prompt: str = "",
    n: int = 1,
    *,
    length: int = 256,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
    cache: bool = True,
    precision: Any = "float32",
    device: str | None = None,
    write: bool = True,
) -> TextSamples:
    """Continues a prompt n times, by at most `length` tokens each, with a run's last checkpoint.

    A text ends with the model's end-of-document token. Temperature 0 takes the likeliest token; `top_k` draws from the
    likeliest tokens only. Text i is the same for any n. `cache=False` recomputes everything for each token.
    """
    for name, value in (("n", n), ("length", length), ("top_k", 1 if top_k is None else top_k)):
        _checks.whole("sample", name, value, low=1)
    _checks.number("sample", "temperature", temperature)
    try:
        encoded = prompt.encode()
    except UnicodeEncodeError as error:
        raise BadInput(f"sample: the prompt {prompt!r} cannot be encoded as UTF-8") from error
    trained = run if isinstance(run, Trained) else open_run(run, device)
    if not isinstance(trained.objective, NextToken):
        raise BadInput(f"{trained.folder.path}: its recipe is no language model; use a run of lm, or unskip.sample")
    last = trained.folder.last_checkpoint()
    assert last is not None
    tokenizer, facts = tokenizer_of(last[1]), trained.facts
    prompt_ids = tokenizer.encode([encoded])[0].tolist() or [tokenizer.end]
    target = next(trained.model.parameters()).device
    ids = torch.tensor(prompt_ids, device=target).repeat(n, 1)
    start = time.perf_counter()
    drawn: list[Tensor] = []
    ended = torch.zeros(n, dtype=torch.bool, device=target)
    draw = _Draw(seed, n, temperature, top_k, facts.vocabulary)
    with evaluating(trained.model), torch.no_grad(), autocast(target, precision):
        for logits in continued(trained.model, ids, drawn, facts.context, length, cache):
            drawn.append(draw(logits))
            ended |= drawn[-1] == tokenizer.end
            if ended.all():
                break
    rows = torch.stack(drawn, 1).tolist()
    end = tokenizer.end
    before = prompt_ids if prompt else []
    texts = [_after(tokenizer, before, row[: row.index(end)] if end in row else row) for row in rows]
    seconds = time.perf_counter() - start
    file = None
    if write:
        about = {"step": trained.step, "prompt": prompt, "temperature": temperature, "top_k": top_k, "seed": seed}
        header = json.dumps(about | {"n": n, "length": length, "precision": str(precision)})
        file = _free(trained.folder.path / "samples", f"step-{trained.step}-text-seed{seed}", header)
        shown = [f"--- {index}\n{prompt}{text}" for index, text in enumerate(texts)]
        file.write_text("\n".join([header, *shown]) + "\n", encoding="utf-8")
    return TextSamples(prompt, texts, len(drawn) * n, seconds, file)


def _after(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> str:
    """The text of ids after those of a prompt: decoded together, as some tokenizers drop the first space of a text."""
    before = tokenizer.decode(prompt)
    whole = tokenizer.decode([*prompt, *ids])
    return whole.removeprefix(before) if whole.startswith(before) else tokenizer.decode(ids)


def _free(folder: Path, name: str, header: str) -> Path:
    """The file of samples with these settings: name.txt, name-2.txt, ...; samples of other settings are kept."""
    folder.mkdir(exist_ok=True)
    for number in itertools.count(1):
        file = folder / f"{name}{f'-{number}' if number > 1 else ''}.txt"
        if not file.exists() or file.read_text(encoding="utf-8").partition("\n")[0] == header:
            break
    return file


def continued(
    model: nn.Module, ids: Tensor, drawn: list[Tensor], context: int, length: int, cache: bool
) -> Iterator[Tensor]:
    """Yields `length` times the next token's logits (n, vocabulary), after ids (n, tokens) and the tokens `drawn`."""
    cache = cache and takes_cache(model)
    past: Any = None
    first, cached = max(0, ids.shape[1] - context), 0  # the first token of the input; the end of the cached tokens
    for _ in range(length):
        tokens = torch.cat([ids, *(token[:, None] for token in drawn)], 1)
        if tokens.shape[1] - first > context:
            first, past = tokens.shape[1] - max(1, context // 2), None
        if cache:
            output = model(tokens[:, cached if past is not None else first :], past_key_values=past, use_cache=True)
            past, cached = output.past_key_values, tokens.shape[1]
        else:
            output = model(tokens[:, first:])
        yield token_logits(model, output)[:, -1].float()


class _Draw:
    """Draws the next tokens of n texts, each with its own random generator."""

    def __init__(self, seed: int, n: int, temperature: float, top_k: int | None, vocabulary: int) -> None:
        self.temperature, self.top_k, self.vocabulary = temperature, top_k, vocabulary
        self.generators = [torch.Generator().manual_seed(seed * 1_000_003 + index) for index in range(n)]

    def __call__(self, logits: Tensor) -> Tensor:
        logits = logits[:, : self.vocabulary]  # logits of a padded vocabulary stand for no token
        if self.temperature == 0:
            return logits.argmax(-1)
        if self.top_k is not None:
            least = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        sums = (logits.double() / self.temperature).softmax(-1).cumsum(-1)
        chance = torch.stack([torch.rand(1, generator=each, dtype=torch.float64) for each in self.generators])
        return torch.searchsorted(sums, chance.to(sums.device) * sums[:, -1:]).clamp(max=self.vocabulary - 1)[:, 0]

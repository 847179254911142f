"""One small random model of each type of AutoModel: audited, rewired, verified, and restored.

Each type has one outcome. KNOWN lists the types whose outcome is not "done", with the reason. A type whose outcome
changes fails its test.
"""

from __future__ import annotations

import gc
import re
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.zoo.examples import EXAMPLES
from tests.zoo.harness import run, same
from tests.zoo.small import build, small_config
from torch import nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_MAPPING, MODEL_MAPPING_NAMES

import unskip
from unskip import Scale
from unskip.anatomy._example import example_for
from unskip.errors import BadInput, ForwardError, RewireError

LIMIT = 60  # seconds of processor time for one type

# (outcome, reason, types)
KNOWN: list[tuple[str, str, str]] = [
    ("does not build small", "needs a library that is not installed", "dinat higgs_audio_v2_tokenizer layoutlmv2"),
    (
        "does not build small",
        "the class behind AutoModel is missing, or takes another configuration",
        "musicgen musicgen_melody t5gemma2_encoder voxtral_realtime_text",
    ),
    (
        "does not build small",
        "its default configuration leaves out what the model reads",
        "cohere_compass cohere_compass_text deepseek_ocr2 diffusion_gemma emu3 ernie4_5_vl_moe granite4_vision "
        "perception_lm pp_ocrv6_medium_det qwen4_exp qwen4_exp_text",
    ),
    (
        "does not build small",
        "its sizes depend on each other in a way that the small ones do not keep",
        "efficientloftr fun_asr_nano lw_detr tvp zamba",
    ),
    (
        "no forward",
        "has no forward, or one that takes a state of its own",
        "bark edgetam_video sam2_video sam3_tracker_video sam3_video",
    ),
    (
        "no forward",
        "takes inputs that are not written out here",
        "csm deepseek_vl_hybrid glm_image glm_image_vqmodel inkling_mm_model lightglue minicpm_ocr_vision "
        "minicpmv4_7_vision molmo2 muse_glimmer muse_glimmer_assistant muse_spark nemotron3_5_transcribe_audio "
        "nemotron3_5_transcribe_word_timestamp neomme omdet-turbo pi0 t5gemma2 voxtral_realtime",
    ),
    (
        "no forward",
        "its sizes depend on each other in a way that the small ones do not keep",
        "align autoformer clap clvp depth_pro edgetam edgetam_vision_model fastspeech2_conformer_with_hifigan gemma3n "
        "hrm_text levit mistral4 neucodec pp_ocrv6_small_det sam2 sam2_hiera_det_model sam2_vision_model sam3_tracker "
        "uvdoc xcodec xcodec2 xlstm zamba2",
    ),
    ("no residual", "mixes several streams by learned matrices (hyper-connections)", "deepseek_v4 glm5_next_text"),
    ("no residual", "a convolutional network without shortcuts", "mobilenet_v1 pp_ocrv5_mobile_rec textnet"),
    ("refused", "an addition is a residual in some of its runs only", "dac pp_doclayout_v4"),
]
EXPECTED = {name: (outcome, reason) for outcome, reason, names in KNOWN for name in names.split()}


class TooLong(Exception):
    pass


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TooLong

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def brief(error: Exception) -> str:
    """The first line of an error, without absolute paths."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {re.sub(r'/[^ ]*site-packages/', '', first)[:300]}"


def make(name: str) -> nn.Module:
    config_class = CONFIG_MAPPING[name]
    model_class = MODEL_MAPPING[config_class]
    return build(model_class[0] if isinstance(model_class, tuple) else model_class, small_config(config_class))


def outcome_of(name: str, record: Callable[[str, object], None]) -> str:
    """The outcome of one type."""
    try:
        model = make(name)
    except TooLong:
        raise
    except Exception as error:
        record("error", brief(error))
        return "does not build small"
    given = EXAMPLES[name](model) if name in EXAMPLES else None
    try:
        audit = unskip.audit(model, given)
    except (BadInput, ForwardError) as error:
        record("error", brief(error))
        return "no forward"
    kinds = Counter(site.kind for site in audit)
    record("sites", ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
    record("unknown", "; ".join(sorted({unknown.reason for unknown in audit.unknown})))
    if not kinds:
        return "no residual"
    plain = any(not site.projected for site in audit)
    record("kept", "" if plain else "kept")
    try:
        check(model, given, plain)
    except RewireError as error:
        record("error", brief(error))
        return "refused"
    return "done"


def check(model: nn.Module, given: Any, plain: bool) -> None:
    """Rewiring is verified and changes the outputs; undo restores them bit for bit."""
    inputs = example_for(model, given).kwargs
    classes = [type(module) for module in model.modules()]
    with torch.no_grad():
        before = run(model, inputs)
        # By default projected shortcuts and long skips are kept, so rewire refuses a model that has only those.
        wiring = unskip.rewire(model, Scale(0.9, 0.8), given, where=None if plain else lambda site: True)
        assert wiring.verified
        assert not same(run(model, inputs), before)
        wiring.undo()
        assert same(run(model, inputs), before)
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.full
@pytest.mark.parametrize("name", list(MODEL_MAPPING_NAMES))
def test_every_type_of_transformers(name: str, record_property: Callable[[str, object], None]) -> None:
    expected, reason = EXPECTED.get(name, ("done", ""))
    record_property("reason", reason)
    with warnings.catch_warnings(), limited(LIMIT):
        warnings.simplefilter("ignore")  # six hundred models with various warnings
        outcome = outcome_of(name, record_property)
    record_property("outcome", outcome)
    gc.collect()
    assert outcome == expected


def test_names_in_known_are_types() -> None:
    names = [name for _, _, names in KNOWN for name in names.split()]
    assert len(set(names)) == len(names)
    assert set(names) | set(EXAMPLES) <= set(MODEL_MAPPING_NAMES)

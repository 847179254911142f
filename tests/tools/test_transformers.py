"""transformers and peft with rewired models: generation, hidden states, files, gradient checkpointing, adapters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.tools.models import gpt2, ids, llama
from tests.zoo.harness import gradient_difference, gradients
from torch import Tensor, nn

import unskip
from unskip import Cut, Decay
from unskip.errors import BadInput, UnskipWarning, WrappedError

pytest.importorskip("transformers")

MODELS = {"gpt2": gpt2, "llama": llama}
CLOSE = 1e-5


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return MODELS[request.param]()


def inputs() -> dict[str, Tensor]:
    """Inputs with use_cache=False, so that the first output is the logits."""
    return {"input_ids": ids(), "attention_mask": torch.ones(2, 6, dtype=torch.long)}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(**inputs()).logits


def differ(a: Tensor, b: Tensor) -> bool:
    return float((a - b).abs().max()) > 1e-2


# --- Generation and hidden states -------------------------------------------------------------------------------------


def generate(model: Any, use_cache: bool) -> tuple[Tensor, Tensor]:
    """The tokens, and the logits from which each was chosen."""
    facts = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    found = model.generate(**inputs(), **facts, return_dict_in_generate=True, use_cache=use_cache)
    return found.sequences, torch.stack(found.logits)


@pytest.mark.parametrize("rule", [Decay(0.3), Cut()], ids=str)
def test_generation_is_the_same_with_and_without_a_cache(model: Any, rule: Any) -> None:
    plain, _ = generate(model, use_cache=True)
    unskip.rewire(model, rule, inputs())
    tokens, scores = generate(model, use_cache=True)
    other, others = generate(model, use_cache=False)
    assert tokens.shape == (2, 14)
    assert torch.equal(tokens, other)
    assert torch.allclose(scores, others, atol=1e-4)
    assert not torch.equal(tokens, plain)
    # The last logits also match one forward pass over the whole text.
    with torch.no_grad():
        whole = model(tokens[:, :-1]).logits[:, -1]
    assert torch.allclose(whole, scores[-1], atol=1e-4)


def test_hidden_states_match_the_rewired_blocks(model: Any) -> None:
    with torch.no_grad():
        plain = model(**inputs(), output_hidden_states=True).hidden_states
        unskip.rewire(model, Decay(0.3), inputs())
        states = model(**inputs(), output_hidden_states=True).hidden_states
        blocks = unskip.features(model, inputs(), pool=None)
    norm = model.transformer.ln_f if hasattr(model, "transformer") else model.model.norm
    assert torch.equal(states[0], plain[0])  # the embedding
    assert torch.allclose(states[1], blocks[0], atol=CLOSE)
    assert torch.allclose(states[2], norm(blocks[1]), atol=CLOSE)  # transformers applies the final norm to the last one
    assert all(differ(states[i], plain[i]) for i in (1, 2))


def test_padded_samples_are_refused_by_measure_with_advice() -> None:
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    with pytest.raises(BadInput, match="texts of one length"):
        unskip.measure(llama(), {"input_ids": ids(), "attention_mask": mask}, jacobians="off")


# --- Files ------------------------------------------------------------------------------------------------------------


def test_save_pretrained_keeps_the_weights(model: Any, tmp_path: Path) -> None:
    plain = logits(model)
    unskip.rewire(model, Decay(0.3), inputs())
    wanted = logits(model)
    with pytest.warns(UnskipWarning, match="save_pretrained"):
        model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    again = type(model).from_pretrained(tmp_path).eval()
    # The files contain the weights and not the wiring, so the loaded model is plain.
    assert torch.allclose(logits(again), plain, atol=CLOSE)
    unskip.rewire(again, Decay(0.3), inputs())
    assert torch.allclose(logits(again), wanted, atol=CLOSE)
    assert differ(wanted, plain)


def test_a_rewired_class_loads_from_its_own_type_as_a_plain_model(model: Any, tmp_path: Path) -> None:
    """`type(model)` and the architecture name in the config are those of the library, with and without root sites."""
    name = type(model).__name__
    unskip.rewire(model, Cut(), inputs())
    with pytest.warns(UnskipWarning, match="save_pretrained"):
        model.save_pretrained(tmp_path)
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded).__name__ == name
    assert loaded.state_dict().keys() == model.state_dict().keys()
    assert not any("unskip" in key for key in loaded.state_dict())


# --- Checkpointing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved tensors", "reentrant"])
@pytest.mark.parametrize("rule", [Decay(0.3), Cut()], ids=str)
def test_gradient_checkpointing_does_not_change_gradients(model: Any, rule: Any, reentrant: bool) -> None:
    model.config.use_cache = False
    model.train()
    example = {"input_ids": ids(), "use_cache": False}
    _, plain = gradients(model, example)
    unskip.rewire(model, rule, inputs())
    _, wanted = gradients(model, example)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    blocks = model.transformer.h if hasattr(model, "transformer") else model.model.layers
    runs = []
    handle = blocks[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    if reentrant:
        model.enable_input_require_grads()
    _, got = gradients(model, example)
    handle.remove()
    assert len(runs) == 2  # forward, and again in the backward pass
    assert gradient_difference(got, wanted) < CLOSE
    assert gradient_difference(wanted, plain) > 1e-2


# --- peft -------------------------------------------------------------------------------------------------------------


def adapted(model: nn.Module) -> Any:
    peft = pytest.importorskip("peft")
    names = ["c_attn"] if hasattr(model, "transformer") else ["q_proj", "v_proj"]
    config = peft.LoraConfig(
        r=2, target_modules=names, fan_in_fan_out=hasattr(model, "transformer"), init_lora_weights=False
    )
    return peft.get_peft_model(model, config).eval()


def test_adapters_of_a_rewired_model(model: Any) -> None:
    wiring = unskip.rewire(model, Decay(0.3), inputs())
    decayed = logits(model)
    wrapped = adapted(model)
    with wrapped.disable_adapter():
        assert torch.allclose(logits(wrapped), decayed, atol=CLOSE)
    tuned = logits(wrapped)
    assert differ(tuned, decayed)
    # The wiring still belongs to the inner model.
    assert wiring.alphas[-1] == 0.3
    wiring.set(Cut())
    cut = logits(wrapped)
    assert differ(cut, tuned)
    # Only adapters have gradients, and these match the cut model.
    wrapped(**inputs()).logits.square().mean().backward()
    with_gradient = {name for name, p in wrapped.named_parameters() if p.grad is not None and p.grad.any()}
    assert with_gradient
    assert all("lora_" in name for name in with_gradient)
    merged = wrapped.merge_and_unload()
    assert torch.allclose(logits(merged), cut, atol=1e-4)
    wiring.undo()
    assert differ(logits(merged), cut)


def test_rewiring_before_and_after_adding_adapters_gives_the_same_model(model: Any) -> None:
    """The model inside of the peft wrapper can be rewired."""
    other = copy.deepcopy(model)
    unskip.rewire(other, Decay(0.3), inputs())
    torch.manual_seed(0)
    before = adapted(other)
    torch.manual_seed(0)
    after = adapted(model)
    plain = logits(after)
    unskip.rewire(after.get_base_model(), Decay(0.3), inputs())
    assert torch.allclose(logits(after), logits(before), atol=CLOSE)
    assert differ(logits(after), plain)


def test_a_peft_wrapper_is_refused(model: Any) -> None:
    wrapped = adapted(model)
    plain = logits(wrapped)
    with pytest.raises(WrappedError, match="wrapped by peft"):
        unskip.rewire(wrapped, Cut(), inputs())
    assert torch.equal(logits(wrapped), plain)


def test_saving_a_peft_wrapper_of_a_rewired_model_is_refused_with_advice(model: Any, tmp_path: Path) -> None:
    unskip.rewire(model, Decay(0.3), inputs())
    wrapped = adapted(model)
    with pytest.raises(WrappedError, match=r"rewired model in peft.*merge_and_unload"):
        unskip.save(wrapped, tmp_path / "x")

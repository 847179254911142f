"""transformers and peft around a rewired model: generation, hidden states, files, checkpointing, adapters."""

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
    """Without a cache in the output, so that what is compared is the logits."""
    return {"input_ids": ids(), "attention_mask": torch.ones(2, 6, dtype=torch.long)}


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(**inputs()).logits


def differ(a: Tensor, b: Tensor) -> bool:
    return float((a - b).abs().max()) > 1e-2


# --- Generation and hidden states -------------------------------------------------------------------------------------


def generate(model: Any, use_cache: bool) -> tuple[Tensor, Tensor]:
    """The tokens, and the logits that each was chosen from."""
    facts = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "output_logits": True}
    found = model.generate(**inputs(), **facts, return_dict_in_generate=True, use_cache=use_cache)
    return found.sequences, torch.stack(found.logits)


@pytest.mark.parametrize("rule", [Decay(0.3), Cut()], ids=str)
def test_generating_with_a_cache_equals_generating_without(model: Any, rule: Any) -> None:
    plain, _ = generate(model, use_cache=True)
    unskip.rewire(model, rule, inputs())
    tokens, scores = generate(model, use_cache=True)
    other, others = generate(model, use_cache=False)
    assert tokens.shape == (2, 14)
    assert torch.equal(tokens, other)
    assert torch.allclose(scores, others, atol=1e-4)
    assert not torch.equal(tokens, plain)
    # The last token again, from one forward over the whole text.
    with torch.no_grad():
        whole = model(tokens[:, :-1]).logits[:, -1]
    assert torch.allclose(whole, scores[-1], atol=1e-4)


def test_hidden_states_are_the_rewired_ones(model: Any) -> None:
    with torch.no_grad():
        plain = model(**inputs(), output_hidden_states=True).hidden_states
        unskip.rewire(model, Decay(0.3), inputs())
        states = model(**inputs(), output_hidden_states=True).hidden_states
        blocks = unskip.features(model, inputs(), pool=None)
    norm = model.transformer.ln_f if hasattr(model, "transformer") else model.model.norm
    assert torch.equal(states[0], plain[0])  # the embedding
    assert torch.allclose(states[1], blocks[0], atol=CLOSE)
    assert torch.allclose(states[2], norm(blocks[1]), atol=CLOSE)  # transformers norms the last one
    assert all(differ(states[i], plain[i]) for i in (1, 2))


def test_samples_of_which_some_are_padded_are_refused_with_what_to_pass() -> None:
    mask = torch.ones(2, 6, dtype=torch.long)
    mask[0, :2] = 0
    with pytest.raises(BadInput, match="texts of one length"):
        unskip.measure(llama(), {"input_ids": ids(), "attention_mask": mask}, jacobians="off")


# --- Files ------------------------------------------------------------------------------------------------------------


def test_the_weights_survive_save_pretrained(model: Any, tmp_path: Path) -> None:
    plain = logits(model)
    unskip.rewire(model, Decay(0.3), inputs())
    wanted = logits(model)
    with pytest.warns(UnskipWarning, match="save_pretrained"):
        model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    again = type(model).from_pretrained(tmp_path).eval()
    # The files hold the weights and not the wiring: what is loaded is the plain model.
    assert torch.allclose(logits(again), plain, atol=CLOSE)
    unskip.rewire(again, Decay(0.3), inputs())
    assert torch.allclose(logits(again), wanted, atol=CLOSE)
    assert differ(wanted, plain)


def test_a_rewired_class_loads_from_its_own_type_as_a_plain_model(model: Any, tmp_path: Path) -> None:
    """Root sites or not, `type(model)` and its name in the configuration stay those of the library."""
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
def test_gradient_checkpointing_gives_the_same_gradients(model: Any, rule: Any, reentrant: bool) -> None:
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


def test_a_rewired_model_takes_adapters(model: Any) -> None:
    wiring = unskip.rewire(model, Decay(0.3), inputs())
    decayed = logits(model)
    wrapped = adapted(model)
    with wrapped.disable_adapter():
        assert torch.allclose(logits(wrapped), decayed, atol=CLOSE)
    tuned = logits(wrapped)
    assert differ(tuned, decayed)
    # The handle still holds the model inside.
    assert wiring.alphas[-1] == 0.3
    wiring.set(Cut())
    cut = logits(wrapped)
    assert differ(cut, tuned)
    # The adapters alone have gradients, and they are those of the cut model.
    wrapped(**inputs()).logits.square().mean().backward()
    with_gradient = {name for name, p in wrapped.named_parameters() if p.grad is not None and p.grad.any()}
    assert with_gradient
    assert all("lora_" in name for name in with_gradient)
    merged = wrapped.merge_and_unload()
    assert torch.allclose(logits(merged), cut, atol=1e-4)
    wiring.undo()
    assert differ(logits(merged), cut)


def test_the_order_of_adapters_and_rewiring_does_not_matter_inside(model: Any) -> None:
    """The plain model inside the wrapper may be rewired: it is the same model, with other linear layers."""
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


def test_a_rewired_model_in_a_peft_wrapper_is_told_how_to_save(model: Any, tmp_path: Path) -> None:
    unskip.rewire(model, Decay(0.3), inputs())
    wrapped = adapted(model)
    with pytest.raises(WrappedError, match=r"rewired model in peft.*merge_and_unload"):
        unskip.save(wrapped, tmp_path / "x")

"""Building models by name: all forms of the text, and one-line errors for bad input."""

import importlib
import json
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from urllib.error import URLError

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import unskip
from unskip import spec
from unskip.errors import BadInput

SOURCE = """
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.f = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, x):
        return x + self.f(x)

def make():
    return nn.Sequential(Block(), Block())

def with_an_argument(depth):
    return Block()

def a_number():
    return 3

def faulty():
    raise KeyError("weights")

instance = Block()
number = 5
"""
FAULT = SOURCE.splitlines().index('    raise KeyError("weights")') + 1

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Iterator[Write]:
    """A function that writes source files. Modules imported from them are removed from sys.modules afterwards."""

    def file(name: str, source: str = SOURCE) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
        return path

    before = set(sys.modules)
    yield file
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def error_message(text: str, **options: bool) -> str:
    """The message of the BadInput that `build` raises. It must be one line that contains the text."""
    with pytest.raises(BadInput) as caught:
        spec.build(text, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert text in message
    return message


# --- timm and torchvision ---


def test_timm() -> None:
    model = spec.build("timm:test_vit")
    assert type(model).__module__ == "timm.models.vision_transformer"
    assert all(p.device.type == "cpu" for p in model.parameters())


def test_torchvision() -> None:
    assert type(spec.build("torchvision:squeezenet1_1")).__name__ == "SqueezeNet"


def test_torchvision_detection_loads_no_backbone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("weights were asked for")

    monkeypatch.setattr("torch.hub.load_state_dict_from_url", refuse)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", refuse)
    assert type(spec.build("torchvision:ssdlite320_mobilenet_v3_large")).__name__ == "SSD"


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("timm:vit_bas_patch16_224", "vit_base_patch16_224"),
        ("timm:resnet5O", "resnet50"),
        ("torchvision:vit_b_61", "vit_b_16"),
        ("tim:vit_base_patch16_224", "timm"),
        ("vit_base_patch16_224", "timm:vit_base_patch16_224"),
        ("vit_b_16", "torchvision:vit_b_16"),
    ],
)
def test_similar_names_are_suggested(text: str, near: str) -> None:
    assert near in error_message(text).replace(text, "", 1)


@pytest.mark.parametrize("text", ["", "timm", "timm:", ":", "nothing", "nothing:at_all", "C:/model"])
def test_unknown_forms_list_the_valid_ones(text: str) -> None:
    assert spec.FORMS in error_message(text)


def test_a_folder_without_a_prefix_lists_the_valid_forms(tmp_path: Path) -> None:
    assert spec.FORMS in error_message(str(tmp_path))


def test_unknown_tag_of_timm() -> None:
    assert "tag" in error_message("timm:test_vit.no_such_tag")


def test_pretrained_weights_need_the_internet() -> None:
    assert "needs the internet" in error_message("timm:vit_tiny_patch16_224", pretrained=True)


def test_pretrained_weights_of_torchvision_need_the_internet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: object, **options: object) -> None:
        raise URLError("no way there")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("torch.hub.urlopen", unreachable)
    told = error_message("torchvision:squeezenet1_1", pretrained=True)
    assert "needs the internet" in told
    assert "no way there" in told


# --- transformers and diffusers ---


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import BertConfig

    folder = tmp_path_factory.mktemp("bert")
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "vocab_size": 20,
    }
    BertConfig(**sizes, dtype="bfloat16").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def dit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from diffusers import DiTTransformer2DModel

    folder = tmp_path_factory.mktemp("pipeline") / "transformer"
    sizes = {"num_layers": 1, "num_attention_heads": 2, "attention_head_dim": 8, "sample_size": 8, "in_channels": 4}
    DiTTransformer2DModel(**sizes, num_embeds_ada_norm=4, norm_num_groups=2).save_pretrained(folder)
    return folder


def test_hf_folder(bert: Path) -> None:
    model = spec.build(f"hf:{bert}")
    assert type(model).__name__ == "BertModel"
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert len(unskip.audit(model)) == 2


def test_hf_pretrained_folder(bert: Path, tmp_path: Path) -> None:
    saved = spec.build(f"hf:{bert}")
    saved.save_pretrained(tmp_path)  # type: ignore[operator]
    loaded, fresh = spec.build(f"hf:{tmp_path}", pretrained=True), spec.build(f"hf:{tmp_path}")
    weight = "embeddings.word_embeddings.weight"
    assert torch.equal(saved.get_parameter(weight), loaded.get_parameter(weight))
    assert not torch.equal(saved.get_parameter(weight), fresh.get_parameter(weight))


def test_hf_errors(tmp_path: Path, dit: Path) -> None:
    assert "no such folder" in error_message(f"hf:{tmp_path / 'nothing'}")
    assert "no config.json" in error_message(f"hf:{tmp_path}")
    assert f"diffusers:{dit}" in error_message(f"hf:{dit}")
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    assert "not valid JSON" in error_message(f"hf:{tmp_path}")
    (tmp_path / "config.json").write_text("[]", encoding="utf-8")
    assert "not a mapping" in error_message(f"hf:{tmp_path}")
    (tmp_path / "config.json").write_text('{"model_type": "no such type"}', encoding="utf-8")
    assert "no such type" in error_message(f"hf:{tmp_path}")


def test_timm_name_on_the_hub_offline() -> None:
    assert "needs the internet" in error_message("timm:hf-hub:unskip/no-such-model")


def test_hf_name_offline() -> None:
    assert "needs the internet" in error_message("hf:unskip/no-such-model")


def test_an_unreachable_hub_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    constants = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("urllib.request.getproxies", dict)
    assert "needs the internet" in error_message("hf:unskip/no-such-model")
    assert constants.HF_HUB_OFFLINE is False


def test_diffusers_folder(dit: Path) -> None:
    model, loaded = spec.build(f"diffusers:{dit}"), spec.build(f"diffusers:{dit}", pretrained=True)
    assert type(model).__name__ == type(loaded).__name__ == "DiTTransformer2DModel"
    saved = load_file(dit / "diffusion_pytorch_model.safetensors")
    assert all(torch.equal(loaded.get_parameter(name), value) for name, value in saved.items())
    assert not all(torch.equal(model.get_parameter(name), value) for name, value in saved.items())
    assert len(unskip.audit(model)) == 2


def test_diffusers_errors(tmp_path: Path, dit: Path) -> None:
    assert "no such folder" in error_message(f"diffusers:{tmp_path / 'nothing'}")
    assert "no config.json" in error_message(f"diffusers:{tmp_path}")
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": "DDIMScheduler"}), encoding="utf-8")
    assert "'DDIMScheduler'" in error_message(f"diffusers:{tmp_path}")
    (dit.parent / "model_index.json").write_text("{}", encoding="utf-8")
    assert f"diffusers:{dit}" in error_message(f"diffusers:{dit.parent}")


@pytest.mark.parametrize(
    ("text", "library", "extra"),
    [
        ("hf:x", "transformers", "hf"),
        ("diffusers:x", "diffusers", "hf"),
        ("timm:x", "timm", "train"),
        ("torchvision:x", "torchvision", "train"),
    ],
)
def test_missing_library_names_the_install_command(
    text: str, library: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, f"{library}.models", raising=False)
    assert f"{library} is not installed: pip install 'unskip[{extra}]'" in error_message(text)


# --- Files ---


def test_file(write: Write) -> None:
    file = write("nets_of_mine.py")
    path = list(sys.path)
    model = spec.build(f"{file}:make")
    assert sys.path == path
    assert type(model[0]).__module__ == "nets_of_mine"  # type: ignore[index]
    example = torch.randn(2, 3, 8)
    assert len(unskip.audit(model, example)) == 2  # needs their source
    assert torch.equal(pickle.loads(pickle.dumps(model))(example), model(example))
    assert type(spec.build(f"{file}:make")[0]) is type(model[0])  # type: ignore[index]
    assert (
        type(spec.build(f"{file}:Block")).__name__ == "Block"
    )  # a class is accepted as a function that returns a model


def test_relative_file(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write("nets_here.py").parent)
    assert len(list(spec.build("nets_here.py:make").children())) == 2


def test_file_imports_from_its_folder(write: Write) -> None:
    write("neighbour_of_nets.py", "from torch import nn\nWIDTH = 7\n")
    file = write(
        "nets_beside.py", "from neighbour_of_nets import WIDTH, nn\ndef make():\n    return nn.Linear(WIDTH, 1)\n"
    )
    assert spec.build(f"{file}:make").in_features == 7


def test_file_in_a_package(write: Write) -> None:
    write("pack_of_nets/__init__.py", "")
    write("pack_of_nets/inner/__init__.py", "")
    write("pack_of_nets/sizes.py", "WIDTH = 6\n")
    source = "from torch import nn\nfrom ..sizes import WIDTH\nclass Net(nn.Linear):\n    def __init__(self):\n"
    file = write("pack_of_nets/inner/net.py", source + "        super().__init__(WIDTH, 1)\n")
    model = spec.build(f"{file}:Net")
    assert model.in_features == 6
    assert type(model).__module__ == "pack_of_nets.inner.net"


@pytest.mark.parametrize("name", ["json.py", "unskip.py", "my-net.v2.py", "__main__.py"])
def test_file_names_that_are_taken_or_unusual(name: str, write: Write) -> None:
    taken = sys.modules.get(Path(name).stem)
    model = spec.build(f"{write(name)}:make")
    assert sys.modules.get(Path(name).stem) is taken
    assert len(unskip.audit(model, torch.randn(2, 3, 8))) == 2
    assert isinstance(pickle.loads(pickle.dumps(model)), nn.Sequential)


def test_two_files_with_the_same_name(write: Write) -> None:
    first = spec.build(f"{write('a/net_twice.py')}:make")
    second = spec.build(f"{write('b/net_twice.py')}:make")
    assert type(first[0]) is not type(second[0])  # type: ignore[index]
    assert isinstance(pickle.loads(pickle.dumps(second))[0], type(second[0]))  # type: ignore[index]


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("mak", ["no 'mak'", "nearest: make"]),
        ("", ["no ''", "make"]),
        ("with_an_argument", ["missing 1 required positional argument: 'depth'"]),
        ("a_number", ["int", "torch.nn.Module"]),
        ("faulty", [f"line {FAULT}", "KeyError: 'weights'"]),
        ("instance", ["Block", "a function"]),
        ("number", ["int", "a function"]),
    ],
)
def test_wrong_function(function: str, words: list[str], write: Write) -> None:
    message = error_message(f"{write('nets_wrong.py')}:{function}")
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("import torch\nimport no_such_library\n", ["line 2", "No module named 'no_such_library'"]),
        ("def make(:\n", ["SyntaxError", "line 1"]),
        ("raise SystemExit('usage: train')\n", ["SystemExit: usage: train"]),
        ("x = 1\n\ny = [][0]\n", ["line 3", "IndexError"]),
        ("raise ValueError('first\\nsecond\\n\\nthe rest')", ["ValueError: first second"]),
    ],
)
def test_file_that_does_not_import(source: str, words: list[str], write: Write) -> None:
    file = write("nets_broken.py", source)
    message = error_message(f"{file}:make")
    assert all(word in message for word in words), message
    assert "nets_broken" not in sys.modules
    file.write_text(SOURCE, encoding="utf-8")  # builds after the file is corrected
    assert isinstance(spec.build(f"{file}:make"), nn.Module)


def test_missing_file_and_missing_function(tmp_path: Path, write: Write) -> None:
    assert "no such file" in error_message(f"{tmp_path / 'nothing.py'}:make")
    file = write("nets_without.py")
    assert f"{file}:FUNCTION" in error_message(str(file))


# --- Large models ---


def light(monkeypatch: pytest.MonkeyPatch, limit: int, make: Callable[..., nn.Module] | None = None) -> nn.Module:
    monkeypatch.setattr(spec, "LARGE", limit)
    if make is not None:
        monkeypatch.setattr(spec, "_from_timm", make)
    return spec.build("timm:test_vit", light=True)


def test_light_builds_only_large_models_on_the_meta_device(monkeypatch: pytest.MonkeyPatch) -> None:
    size = sum(p.numel() for p in spec.build("timm:test_vit").parameters())
    assert {p.device.type for p in light(monkeypatch, size - 1).parameters()} == {"meta"}
    assert {p.device.type for p in light(monkeypatch, size).parameters()} == {"cpu"}
    monkeypatch.setattr(spec, "LARGE", 0)
    assert {p.device.type for p in spec.build("timm:test_vit").parameters()} == {"cpu"}


def test_light_audit_finds_the_same_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    whole, bare = unskip.audit(spec.build("timm:test_vit")), unskip.audit(light(monkeypatch, 0))
    assert len(whole) > 0
    assert [(s.path, s.kind, s.norm, s.branch) for s in whole] == [(s.path, s.kind, s.norm, s.branch) for s in bare]
    assert all(s.ratio is not None for s in whole)
    assert all(s.ratio is None for s in bare)


def test_light_builds_normally_if_the_constructor_needs_values(monkeypatch: pytest.MonkeyPatch) -> None:
    def needs_values(name: str, pretrained: bool) -> nn.Module:
        return nn.Linear(int(torch.full((), 3.0).item()), 1)

    assert light(monkeypatch, 0, needs_values).weight.device.type == "cpu"


def test_models_of_files_are_never_built_on_the_meta_device(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "LARGE", 0)
    model = spec.build(f"{write('nets_light.py')}:make", light=True)
    assert {p.device.type for p in model.parameters()} == {"cpu"}


def test_an_out_of_memory_error_is_not_bad_input(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(name: str, pretrained: bool) -> nn.Module:
        raise MemoryError

    monkeypatch.setattr(spec, "_from_timm", too_large)
    with pytest.raises(MemoryError):
        spec.build("timm:test_vit")


def test_a_library_that_returns_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    timm = ModuleType("timm")
    timm.is_model = lambda name: True  # type: ignore[attr-defined]
    timm.create_model = lambda name, pretrained: Tensor()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "timm", timm)
    assert "returns a Tensor" in error_message("timm:x")

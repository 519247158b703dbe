"""Loading rejects models that the torch engine cannot serve, with a message that says why."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import GROUPED, llama_config, make_network, make_tokenizer, slow_logits
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    DogeConfig,
    FalconConfig,
    GPTNeoConfig,
    JambaConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    RwkvConfig,
    T5Config,
    ViTConfig,
)

from stepspec.engines import hugging_face
from stepspec.engines.hugging_face import load_tokenizer, template_problem, weights_hash
from stepspec.engines.torch_engine import self_check
from stepspec.engines.torch_engine.engine import TorchEngine
from stepspec.engines.torch_engine.judge import TorchJudge
from stepspec.engines.torch_engine.network import load_network
from stepspec.engines.torch_engine.self_check import checked_model
from stepspec.errors import ModelError, UsageError

SMALL = {"vocab_size": 48, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
TRAINED = {"initializer_range": 0.3}  # large weights, so that attention matters as in a trained model

UNSUPPORTED = {
    "Llama 4": (
        Llama4TextConfig(**GROUPED, layer_types=["chunked_attention", "full_attention"]),
        "has layers of type chunked_attention",
    ),
    "T5": (T5Config(vocab_size=48, d_model=32, num_layers=2), "is an encoder-decoder model"),
    "Mamba": (
        MambaConfig(vocab_size=48, hidden_size=32, num_hidden_layers=2),
        "linear_attention|has no attention",
    ),
    "RWKV": (RwkvConfig(vocab_size=48, hidden_size=32, num_hidden_layers=2), "has no attention layers"),
    "Jamba": (JambaConfig(**GROUPED), "has layers of type"),
}

OWN_ATTENTION = "it does not use transformers' attention interface"
LOCAL = [[["global", "local"], 1]]

NOT_REPRODUCED: dict[str, tuple[PreTrainedConfig, str]] = {
    "BERT": (
        BertConfig(**SMALL, **TRAINED, intermediate_size=48),
        "its logits for a token depend on later tokens",
    ),
    "Falcon with ALiBi": (FalconConfig(**SMALL, alibi=True), OWN_ATTENTION),
    "GPT-Neo": (
        GPTNeoConfig(vocab_size=48, hidden_size=32, num_layers=2, num_heads=4, attention_types=LOCAL),
        OWN_ATTENTION,
    ),
    "BART's decoder": (
        BartConfig(vocab_size=48, d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48),
        "it does not take position_ids as an input",
    ),
    "Doge": (DogeConfig(**GROUPED), "its layers add a bias to the attention scores"),
}


@pytest.mark.parametrize("kind", UNSUPPORTED)
def test_models_that_cannot_roll_back_are_rejected_by_their_configuration(kind: str, tmp_path: Path) -> None:
    """The folder has no weights, because the error comes before they are loaded."""
    config, reason = UNSUPPORTED[kind]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=reason) as refusal:
        TorchEngine.load(str(tmp_path), device="cpu")
    assert "Serve it with vLLM or another server instead." in str(refusal.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", NOT_REPRODUCED)
def test_models_that_are_not_reproduced_are_rejected_by_their_outputs(kind: str, dtype: torch.dtype) -> None:
    config, reason = NOT_REPRODUCED[kind]
    with pytest.raises(ModelError) as refusal:
        checked_model(make_network(config).to(dtype), "odd")
    assert str(refusal.value) == (
        f"The torch engine does not reproduce odd: {reason}. Serve it with vLLM or another server instead."
    )


def test_a_text_with_unstable_logits_does_not_reject_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Example: SmolLM2 in bfloat16 on special tokens that it was not trained on. Its own logits are noise there."""
    own_logits = self_check._own_logits

    def noisy(network: PreTrainedModel, ids: list[int]) -> Tensor:
        logits = own_logits(network, ids)
        return logits if ids[0] != 5 else -logits

    monkeypatch.setattr(self_check, "_own_logits", noisy)
    checked_model(make_network(llama_config()).bfloat16(), "noisy")
    with pytest.raises(ModelError, match="off by 2"):
        checked_model(make_network(llama_config()), "wrong")


def save_model(folder: Path, config: PreTrainedConfig | None = None) -> None:
    network = make_network(config or llama_config())
    network.save_pretrained(folder)
    make_tokenizer().own.save_pretrained(folder)


def empty(folder: Path) -> None:
    pass


def broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{", "utf-8")


def unknown_type(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": "no-such-model"}), "utf-8")


def no_language_model(folder: Path) -> None:
    ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=4).save_pretrained(folder)


def no_weights(folder: Path) -> None:
    save_model(folder)
    (folder / "model.safetensors").unlink()


def cut_weights(folder: Path) -> None:
    save_model(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])


def other_shapes(folder: Path) -> None:
    save_model(folder, llama_config(hidden_size=64))
    llama_config().save_pretrained(folder)


def missing_weights(folder: Path) -> None:
    save_model(folder)
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def with_config(folder: Path, **changes: object) -> None:
    save_model(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text("utf-8")) | changes), "utf-8")


CONFIGS: dict[str, dict[str, object]] = {
    "no heads": {"num_attention_heads": 0},
    "no key heads": {"num_key_value_heads": 0},
    "a vocabulary in words": {"vocab_size": "many"},
    "a width that is a list": {"hidden_size": [32]},
    "layers below none": {"num_hidden_layers": -1},
    "more layers than anybody has": {"num_hidden_layers": 10**9},
    "a vocabulary beyond memory": {"vocab_size": 10**12},
    "an end that is no token": {"eos_token_id": "the end"},
    "an activation that is none": {"hidden_act": "guess"},
    "a rope of a number": {"rope_parameters": 7},
    "a context of a word": {"max_position_embeddings": "long"},
}


class Payload:
    """An object that creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.file,)


THRICE = "".join(f"{{% for {name} in range(99999) %}}" for name in "abc") + 3 * "{% endfor %}"
RECURSION = "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}"
TEMPLATES = {
    THRICE: "it does not terminate",
    RECURSION: "it recurses without end",
    "{{ 'a' * 10000000000 }}": "it takes more than 1024 MiB of memory",
    "{{ 'a' * 10000000 }}": "it renders a short conversation to 10000000 characters",
    "{% for %}": "it is not a valid template",
    f"{{{{ {'9' * 5_000} }}}}": "it is not a valid template",
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_an_invalid_configuration_is_rejected(kind: str, tmp_path: Path) -> None:
    with_config(tmp_path, **CONFIGS[kind])
    check_refusal(tmp_path, ".")


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    save_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Payload(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    check_refusal(tmp_path, "are pickles .*Convert them to safetensors")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("template", TEMPLATES)
def test_an_unusable_template_is_rejected(template: str) -> None:
    limit = {"cpu_s": 1} if template == THRICE else {}
    assert (template_problem(template, **limit) or "").startswith(TEMPLATES[template])


def test_a_template_whose_trial_fails_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number, (program, message) in enumerate(
        {
            "raise ValueError('first\\nlast')": "it cannot be tried: last",
            "raise SystemExit(3)": "it cannot be tried: no reason",
        }.items()
    ):
        trial = tmp_path / f"{number}.py"
        trial.write_text(program, "utf-8")
        monkeypatch.setattr("stepspec.engines.hugging_face.TRIAL", trial)
        assert (template_problem(f"{{{{ {number} }}}}") or "").startswith(message)


def test_an_unusable_template_rejects_the_model_and_one_that_raises_errors_does_not(tmp_path: Path) -> None:
    save_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(RECURSION, "utf-8")
    with pytest.raises(ModelError, match=r"The chat template of .* cannot be used: it recurses without end"):
        load_tokenizer(str(tmp_path))
    raises_errors = "{{ raise_exception('no') }}{% generation %}{{ messages[0].x.y }}{% endgeneration %}"
    assert template_problem(raises_errors) is None


def check_refusal(folder: Path, message: str) -> None:
    """Assert that loading the folder raises a one-line error with this message and the folder's name."""
    with pytest.raises(ModelError, match=message) as refusal:
        TorchEngine.load(str(folder), device="cpu")
    assert str(folder) in str(refusal.value) or folder.name in str(refusal.value)
    assert "\n" not in str(refusal.value)


def no_tokenizer(folder: Path) -> None:
    save_model(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


@pytest.mark.parametrize(
    "spoil",
    [
        empty,
        broken_config,
        unknown_type,
        no_language_model,
        no_weights,
        cut_weights,
        other_shapes,
        missing_weights,
        no_tokenizer,
    ],
)
def test_a_folder_without_a_valid_model_is_rejected(spoil: Callable[[Path], None], tmp_path: Path) -> None:
    spoil(tmp_path)
    check_refusal(tmp_path, ".")


def test_a_folder_that_does_not_exist_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="There is no folder"):
        TorchEngine.load(str(tmp_path / "nothing here"), device="cpu")


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ("dtype=fp16", "dtype 'fp16' is unknown. Known: 'float32'"),
        ("threads=0", "threads must be at least 1"),
        ("threads=two", "threads must be a whole number"),
        ("thread=2", "Did you mean 'threads'?"),
    ],
)
def test_bad_options_of_a_model_are_sentences(options: str, problem: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=re.escape(problem)):
        TorchEngine.load(f"{tmp_path}?{options}")


@pytest.mark.anyio
@pytest.mark.parametrize("config", [llama_config(), LlamaConfig(**GROUPED, tie_word_embeddings=True)])
async def test_a_model_folder_is_loaded_and_described(config: LlamaConfig, tmp_path: Path) -> None:
    save_model(tmp_path, config)
    engine = TorchEngine.load(f"{tmp_path}?dtype=bfloat16&threads=2", device="cpu")
    try:
        assert engine.describe() == {
            "name": tmp_path.name,
            "weights": weights_hash(str(tmp_path)),
            "dtype": "bfloat16",
            "device": "cpu",
            "threads": 2,
        }
        assert engine.max_context == config.max_position_embeddings
        assert engine.tokenizer.decode([3, 5]) == engine.tokenizer.piece(3) + engine.tokenizer.piece(5)
    finally:
        await engine.aclose()


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_kernel_that_a_model_names_is_not_loaded(tmp_path: Path, key: str) -> None:
    save_model(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text("utf-8")), key: "someone/kernel"}), "utf-8")
    network = load_network(str(tmp_path), "cpu")
    assert network.config._attn_implementation == "sdpa"
    TorchJudge.load(str(tmp_path), "cpu")


def test_equal_weights_have_equal_hashes_and_other_weights_other_hashes(tmp_path: Path) -> None:
    for name, seed in (("one", 0), ("two", 0), ("three", 1)):
        make_network(llama_config(), seed).save_pretrained(tmp_path / name)
    one, two, three = (weights_hash(str(tmp_path / name)) for name in ("one", "two", "three"))
    assert one is not None
    assert one == two != three
    shutil.rmtree(tmp_path / "one")
    assert weights_hash(str(tmp_path / "one")) is None


def test_the_context_ends_where_the_position_encoding_would_change() -> None:
    """LongRoPE uses different factors for long texts, so keys cached before the change would be wrong."""
    factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    rope = {"rope_type": "longrope", "rope_theta": 10_000.0, **factors}
    config = Phi3Config(**GROUPED, rope_parameters=rope, original_max_position_embeddings=64, sliding_window=None)
    assert checked_model(make_network(config), "long").max_context == 64


def test_loading_does_not_change_the_global_random_state() -> None:
    network = AutoModelForCausalLM.from_config(llama_config())
    before = torch.get_rng_state()
    checked_model(network, "tiny")
    assert torch.equal(torch.get_rng_state(), before)


def test_attention_layers_of_every_supported_shape_are_reproduced() -> None:
    """One key head per query head, per group of query heads, and for all query heads."""
    ids = [5, 6, 7, 8]
    for num_key_heads in (4, 2, 1):
        network = make_network(llama_config(num_key_value_heads=num_key_heads))
        expected = slow_logits(network, ids)
        with torch.inference_mode():
            assert torch.allclose(checked_model(network, "tiny").extend([0], [ids])[0], expected, atol=1e-4)


@pytest.mark.parametrize("load", [TorchEngine.load, load_tokenizer])
def test_an_unreachable_hub_is_a_one_line_error(
    load: Callable[[str], object], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(hugging_face, "ENDPOINT", "http://127.0.0.1:9")  # no process listens there
    with pytest.raises(ModelError, match=r"no folder 'nobody/nowhere', .*http://127.0.0.1:9 cannot") as caught:
        load("nobody/nowhere")
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_a_downloaded_model_is_loaded_while_the_hub_is_unreachable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hugging_face, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(hugging_face, "try_to_load_from_cache", lambda name, file: str(tmp_path / file))
    assert hugging_face.loading_options("nobody/cached")["local_files_only"]


@pytest.mark.parametrize("name", ["a/b/c", "no such model", "x" * 200])
def test_an_invalid_model_name_is_not_looked_up(name: str) -> None:
    with pytest.raises(ModelError, match="not a valid model name on the Hub"):
        load_tokenizer(name)

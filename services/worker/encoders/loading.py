"""Loads an encoder onto a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from penstock.protocol.config import Config, ConfigError
from penstock.protocol.config.machine import read_machine
from penstock.protocol.model_info import BadModelFolder, ModelInfo
from penstock.protocol.pooling import Pooling, attends_both_ways, read_pooling
from penstock.services.worker.checkpoint import Checkpoint
from penstock.services.worker.encoders.bidirectional_decoder import load_bidirectional
from penstock.services.worker.encoders.encoder import Encoder
from penstock.services.worker.encoders.executor import EncoderExecutor, StatesOf, made_up_prompt
from penstock.services.worker.encoders.families import encoder_specification
from penstock.services.worker.encoders.pooled import Head
from penstock.services.worker.encoders.specification import EncoderSpecification
from penstock.services.worker.encoders.throttle import Throttle
from penstock.services.worker.gpu.triton_trial import why_no_kernels
from penstock.services.worker.load_report import LoadReport
from penstock.services.worker.memory import plan_capacity, whole_prompts
from penstock.services.worker.model_loading import choose_device, choose_dtype
from penstock.services.worker.pooling_tasks import classifier_layer, folder_tasks
from penstock.services.worker.quantization.reading import read_quantization

DUMMY_STD = 0.02
Shapes = dict[str, tuple[int, ...]]


def load_encoder_executor(
    config: Config,
    info: ModelInfo,
    progress: Callable[[str], None],
    loaded: Callable[[LoadReport], None] = lambda report: None,
) -> EncoderExecutor:
    """Raises ``BadModelFolder`` and ``ConfigError``."""
    pooling = read_pooling(info, config.model)
    _refuse_unfit(config, info)
    device = choose_device(config.device.device, config.device.device_index)
    dtype = choose_dtype(config.model.dtype, info, device)
    threads = config.device.threads or read_machine().physical_cores
    torch.set_num_threads(threads)
    sizes = whole_prompts(plan_capacity(config, info, 1, 2**40))
    encoder: StatesOf
    head = None
    random = config.loading.load_format == "dummy"
    seed = config.model.seed if random else None
    layers = []
    if attends_both_ways(info):
        longest = sizes.max_model_len
        encoder = load_bidirectional(info, longest, dtype, device, progress, loaded, seed)
        if pooling.labels:
            hidden = encoder.hidden_size
            layers = [classifier_layer(info, len(pooling.labels), hidden, random=random)]
    else:
        encoder, head = _load_encoder(config, info, pooling, dtype, device, progress, loaded)
    yields = device.type == "cpu" and config.cache.share() < 1.0
    executor = EncoderExecutor(encoder, head, pooling.kind, sizes, dtype, threads, yields=yields)
    executor.tasks = folder_tasks(pooling, layers, random=random)
    executor.labels = pooling.labels
    if device.type == "cuda":
        use_kernels(executor, device, config.cache.share() < 1.0)
        del encoder  # whose weights the kernels may have in another form
        torch.cuda.empty_cache()
    if device.type == "cpu" and config.device.threads is None and threads > 1:
        progress("measuring how many threads are fastest")
        executor.measure_short_steps()
    progress("running once")
    executor.compute([made_up_prompt(sizes, 16)])
    return executor


def _refuse_unfit(config: Config, info: ModelInfo) -> None:
    """Raises ``ConfigError`` for flags that encoders do not have, and ``BadModelFolder`` for
    weights that they do not take."""
    if config.model.model_impl == "transformers":
        raise ConfigError(
            f"--model-impl transformers: {info.architecture} is an encoder, which Penstock's own "
            "code computes; leave the flag out"
        )
    if config.model.quantization != "none":
        raise ConfigError(
            f"--quantization {config.model.quantization}: {info.architecture} is an encoder, whose "
            "weights stay plain; leave the flag out"
        )
    if config.cache.kv_cache_dtype != "auto":
        raise ConfigError(
            f"--kv-cache-dtype {config.cache.kv_cache_dtype}: {info.architecture} is an encoder, "
            "which keeps no keys and values; leave the flag out"
        )
    if config.device.deterministic:
        raise ConfigError(
            f"--deterministic: {info.architecture} is an encoder, and it is for models that "
            "generate; leave the flag out"
        )
    if read_quantization(info) is not None and not attends_both_ways(info):
        raise BadModelFolder(
            f"{info.folder / 'config.json'}: quantization_config: the weights of encoders "
            f"({info.architecture}) must be plain; use the checkpoint in bfloat16 or float32"
        )


def use_kernels(executor: EncoderExecutor, device: torch.device, beside: bool) -> None:
    """Where they work. beside: other models compute on the device."""
    reason = why_no_kernels(device) or executor.use_kernels(Throttle() if beside else None)
    if reason:
        executor.summary = f"an encoder, by torch's operations; our kernels: {reason}"


def _load_encoder(
    config: Config,
    info: ModelInfo,
    pooling: Pooling,
    dtype: torch.dtype,
    device: torch.device,
    progress: Callable[[str], None],
    loaded: Callable[[LoadReport], None],
) -> tuple[Encoder, Head | None]:
    model, labels = encoder_specification(info), len(pooling.labels)
    if config.loading.load_format == "dummy":
        base, tensors = "", _random(model, labels, dtype, device, config.model.seed)
    else:
        progress("checking the checkpoint")
        checkpoint = Checkpoint(Path(info.folder))
        base = base_of(model, checkpoint.shapes())
        shapes = shapes_of(model, base, labels)
        checkpoint.check(shapes, lambda name: _is_harmless(model, name, base))
        tensors = {n: torch.empty(s, dtype=dtype, device=device) for n, s in shapes.items()}
        loaded(checkpoint.load(tensors, progress, lambda name: True))
    with torch.inference_mode():
        encoder = Encoder(model, tensors, base)
        return encoder, Head(model, labels, tensors, base) if labels else None


def base_of(model: EncoderSpecification, stored: Shapes) -> str:
    """What stands ahead of the encoder's names in a checkpoint."""
    base = model.names.base
    return base if f"{base}{model.names.words}.weight" in stored else ""


def shapes_of(model: EncoderSpecification, base: str, labels: int) -> Shapes:
    """Every tensor by its name. labels: of the classifier; 0: there is none."""
    return {name: shape for name, shape in _shapes(model, base, labels) if name}


def _shapes(
    model: EncoderSpecification, base: str, labels: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    names, hidden = model.names, model.hidden_size
    heads = model.num_heads
    yield f"{base}{names.words}.weight", (model.vocab_size, hidden)
    for name, rows, width in (
        (names.positions, model.positions, hidden),
        (names.segments, model.segments, hidden),
        (names.relative, model.relative_buckets, heads),
    ):
        if name and rows:
            yield f"{base}{name}.weight", (rows, width)
    norms = [names.embedding_norm, names.final_norm]
    for number in range(len(model.layers)):
        ahead = names.layer.format(number)
        for linear in model.linears:
            yield from linear.shapes(base + ahead).items()
        if number or not model.pre_norm:
            norms.append(ahead + names.attention_norm)
        norms.append(ahead + names.mlp_norm)
    for name in norms:
        if name:
            yield from _norm(base + name, hidden, model.norm_bias)
    for layer in model.head if labels else ():
        prefix = base if layer.within_base else ""
        if layer.kind == "norm":
            yield from _norm(prefix + layer.name, hidden, layer.bias)
        else:
            yield from layer.linear(hidden, labels).shapes(prefix).items()


def _norm(name: str, width: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (width,)
    if bias:
        yield f"{name}.bias", (width,)


def _is_harmless(model: EncoderSpecification, name: str, base: str) -> bool:
    """Surplus tensors: heads that nobody asks for, and buffers of older checkpoints."""
    if name.endswith(("position_ids", "embeddings.token_type_ids")):
        return True
    bare = name.removeprefix(base)
    heads = ("pooler.", "cls.", "lm_head.", "classifier.", "pre_classifier.", "vocab_", "head.")
    return bare.startswith((*heads, "decoder."))


def _random(
    model: EncoderSpecification, labels: int, dtype: torch.dtype, device: torch.device, seed: int
) -> dict[str, Tensor]:
    """Random weights; norms are 1."""
    generator = torch.Generator(device).manual_seed(seed)
    found = {}
    for name, shape in shapes_of(model, "", labels).items():
        tensor = torch.ones(shape, dtype=dtype, device=device)
        if len(shape) > 1 or not name.endswith("weight"):
            tensor.normal_(0.0, DUMMY_STD, generator=generator)
        found[name] = tensor
    return found

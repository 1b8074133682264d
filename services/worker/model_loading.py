"""Loads a checkpoint onto a device, measures a step, takes KV memory."""

from __future__ import annotations

import gc
import logging
from typing import TYPE_CHECKING

import msgspec
import torch

from penstock.protocol.config import Config, ConfigError
from penstock.protocol.config.machine import read_machine
from penstock.protocol.judging import JUDGED
from penstock.protocol.model_info import BadModelFolder, ModelInfo, read_model_info
from penstock.protocol.pooling import Pooling, read_pooling
from penstock.services.worker.adapters import loading as adapter_loading
from penstock.services.worker.adapters.adapter_loader import AdapterLoader
from penstock.services.worker.adapters.model_adapters import ModelAdapters
from penstock.services.worker.ahead_checks import check_settings, type_name
from penstock.services.worker.determinism import check_deterministic_kernels, repeats
from penstock.services.worker.device_memory import CudaMemory
from penstock.services.worker.drafting_executor import DraftingExecutor
from penstock.services.worker.first_steps import executor_of, run_first
from penstock.services.worker.gpu.triton_trial import failure_of_triton
from penstock.services.worker.grammar_rows import tokenizer_loader
from penstock.services.worker.held.loading import (
    MadeModel,
    Preparation,
    account_of,
    hold_on_device,
    hold_on_host,
    holding_of,
    restored,
    with_held,
)
from penstock.services.worker.kv_cache_checks import check_kernels
from penstock.services.worker.loaded_model import (
    AttentionAlone,
    LoadedModel,
    kernels_for,
)
from penstock.services.worker.memory_account import dtype_name
from penstock.services.worker.model_executor import ModelExecutor
from penstock.services.worker.model_memory import in_use, plan_memory
from penstock.services.worker.model_weights import Loaded, Progress, make_model
from penstock.services.worker.models.causal_model import CausalModel
from penstock.services.worker.models.decoder import Decoder
from penstock.services.worker.models.dense_form import DenseModel
from penstock.services.worker.models.rank_shares import RankPlace
from penstock.services.worker.models.weight_words import words_of_products
from penstock.services.worker.plain_attention import (
    AnyAttention,
    AttentionOfKinds,
    choose_plain_attention,
)
from penstock.services.worker.pooling_tasks import (
    Layer,
    classifier_layer,
    folder_tasks,
    judge_layer,
    token_ids,
)
from penstock.services.worker.prompt_sums import PromptSums
from penstock.services.worker.quantization.reading import read_quantization
from penstock.services.worker.rank_choice import rank_place, words_of_stage
from penstock.services.worker.rank_group import HostRanks, RankGroup
from penstock.services.worker.speculation.model_drafter import ModelDrafter
from penstock.services.worker.speculation.setup import make_drafter, make_drafting

if TYPE_CHECKING:
    from penstock.protocol.wire.messages.engine import Adapter
    from penstock.services.worker.ahead_compilation import AheadCompilation
    from penstock.services.worker.gpu.compressed_layers import Compression
    from penstock.services.worker.step_profile import AnyExecutor

_log = logging.getLogger("penstock.worker")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def load_model_executor(
    config: Config,
    progress: Progress,
    loaded: Loaded = lambda report: None,
    ahead: AheadCompilation | None = None,
    preparation: Preparation | None = None,
) -> AnyExecutor:
    """``loaded`` is told what was read; ``ahead`` compiles kernels meanwhile;
    ``preparation``: of a worker that is to replace one that still runs.

    A model of which Triton fails to compile or to launch a kernel is loaded again, without kernels
    of ours: those have changed the form of its weights by then.

    Raises ``BadModelFolder`` or ``ConfigError``, where possible before memory is taken, and
    ``NotPrepared``.
    """
    try:
        return _load(config, progress, loaded, ahead, "", preparation)
    except Exception as failure:
        reason = failure_of_triton(failure)
        if not reason or preparation is not None:
            raise
    _log.warning("the model is loaded again, without kernels of Penstock's own: %s", reason)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return _load(config, progress, loaded, None, f"a kernel failed: {reason}")


def _load(
    config: Config,
    progress: Progress,
    loaded: Loaded,
    ahead: AheadCompilation | None,
    without: str,
    preparation: Preparation | None = None,
) -> AnyExecutor:
    """without: why there are no kernels of ours, if there are to be none."""
    info = read_model_info(config.model.model)
    device = choose_device(config.device.device, config.device.device_index)
    dtype = choose_dtype(config.model.dtype, info, device)
    name = dtype_name(dtype)
    on_cpu = device.type == "cpu"
    check_settings(config, info, name, None if on_cpu else torch.cuda.get_device_capability(device))
    place = rank_place(config, info)
    ranks = ranks_of(place, info, device, config) if place.size > 1 else None
    cores = max(1, read_machine().physical_cores // place.size)
    torch.set_num_threads(config.device.threads or cores)
    pooling = read_pooling(info, config.model)
    holding = None if without else holding_of(config, dtype, device)
    made = None if holding is None else restored(holding, config, info, device, progress, loaded)
    if preparation is not None:
        preparation.begin(holding, made, CudaMemory(device))
    elif made is not None and made.kv is not None:
        made.kv.receive()
    if made is None:
        made = _made(config, info, dtype, device, pooling, ranks, progress, loaded, without)
        made = made if holding is None else hold_on_host(holding, made)
    divided = ranks is not None
    subject, adapters, held = _with_adapters(made, config, info, progress, divided=divided)
    if holding is not None:
        subject = with_held(subject, made)
    if ahead is not None and not isinstance(subject.kernels, str):
        ahead.finish(progress)
    progress("measuring a step")
    account = account_of(made, device) or plan_memory(subject, config, info)
    if holding is not None and not made.restored:
        subject = hold_on_device(holding, subject, account)
    executor = executor_of(subject, account.sizes, progress)
    executor.grammars.serve(tokenizer_loader(info))
    run_first(executor, subject, config.device.threads, cores, progress, ahead)
    _complete(executor, config, info, pooling, made)
    alone = config.cache.share() == 1.0 and preparation is None  # else others take theirs now
    if device.type == "cuda" and alone:
        account = in_use(account, CudaMemory(device))
    executor.account, executor.adapters = account, adapters
    executor.repeats = repeats(config, info, pooling, device.type, name)
    if holding is not None and holding.may_leave:
        executor.rests = holding
    if held is not None:
        executor.loader = AdapterLoader(held, config.loading.max_lora_rank)
    return executor


def _with_adapters(
    made: MadeModel, config: Config, info: ModelInfo, progress: Progress, *, divided: bool
) -> tuple[LoadedModel, list[Adapter], ModelAdapters | None]:
    """A model with what computes it, its adapters from the start, and what holds adapters, if
    anything does. divided: among ranks. Raises ``BadModelFolder`` and ``ConfigError``."""
    model, kernels = made.model, adapter_loading.kernels_for_adapters(config, made.kernels)
    check_kernels(config, model.device, kernels if isinstance(kernels, str) else "")
    if model.device.type != "cpu":
        check_deterministic_kernels(config, kernels)
    adapters, held = adapter_loading.load_adapters(
        config,
        model,
        in_places=isinstance(kernels, DenseModel),
        most_virtual=adapter_loading.most_virtual_tokens(config, info),
    )
    compresses = not divided and not made.restored
    subject = subject_of(model, kernels, config, progress, held, compresses=compresses)
    return subject, adapters, held


def _complete(
    executor: AnyExecutor, config: Config, info: ModelInfo, pooling: Pooling, made: MadeModel
) -> None:
    """Let an executor say what it computes with, do what the folder is for, and draft."""
    model = made.model
    executor.summary += words_of_weights(config, info, model) + words_of_stage(config, info)
    if isinstance(executor, ModelExecutor):
        random = config.loading.load_format == "dummy"
        add_tasks(executor, pooling, info, model, made.judged, random=random)
    speculate(executor, config, model.device, _drafter_for(executor, config, info, model))


def _made(
    config: Config,
    info: ModelInfo,
    dtype: torch.dtype,
    device: torch.device,
    pooling: Pooling,
    ranks: RankGroup | None,
    progress: Progress,
    loaded: Loaded,
    without: str,
) -> MadeModel:
    """The model of the folder. without: as in ``_load``. Raises ``BadModelFolder``."""
    bare = not pooling.generates and not pooling.is_judge
    model = make_model(config, info, dtype, device, progress, loaded, headless=bare, ranks=ranks)
    leave_codes(model, without)
    judged = judge_of(model, info, pooling) if pooling.is_judge else None
    kernels: DenseModel | AttentionAlone | str = without or "tasks need the states of prompts"
    if not pooling.tasks and not without:
        kernels = kernels_for(model, config.cache.block_size)
    return MadeModel(model, kernels, judged)


def subject_of(
    model: CausalModel,
    kernels: DenseModel | AttentionAlone | str,
    config: Config,
    progress: Progress,
    adapters: ModelAdapters | None,
    *,
    compresses: bool,
) -> LoadedModel:
    """A model with what computes it. compresses: whether weights may be compressed, too."""
    kind = config.cache.kv_kind
    if isinstance(kernels, str):
        attention = plain_attention(model, config.cache.block_size)
        return LoadedModel(model, kernels, attention, kind=kind, adapters=adapters)
    if isinstance(kernels, AttentionAlone):
        return LoadedModel(model, kernels, kind=kind)
    if config.device.deterministic:
        return LoadedModel(model, kernels, deterministic=True)
    compression = choose_compression(kernels, config, progress) if compresses else None
    return LoadedModel(model, kernels, compression=compression, kind=kind, adapters=adapters)


def ranks_of(place: RankPlace, info: ModelInfo, device: torch.device, config: Config) -> RankGroup:
    """Those among whom the model is divided."""
    if device.type == "cpu":
        return HostRanks(place, info.vocab_size)
    from penstock.services.worker.gpu.device_ranks import DeviceRanks

    one_shot = not config.cluster.disable_custom_all_reduce
    return DeviceRanks(place, info.vocab_size, one_shot)


def leave_codes(model: CausalModel, without: str) -> None:
    """Make quantized weights plain on a GPU where no kernel of ours can multiply them; without: why
    there are to be none."""
    from penstock.services.worker.gpu.triton_trial import why_no_kernels

    if not isinstance(model, Decoder) or model.device.type == "cpu" or not model.quantized:
        return
    if reason := without or why_no_kernels(model.device):
        _log.warning("quantized weights become plain, which takes more memory: %s", reason)
        model.make_plain()


def words_of_weights(config: Config, info: ModelInfo, model: CausalModel) -> str:
    """What quantized weights are, and on a GPU what multiplies them, for the log."""
    quantization = read_quantization(info, config.model.quantization)
    if quantization is None:
        return ""
    words = f"; weights: {quantization.title}"
    if isinstance(model, Decoder) and model.device.type != "cpu":
        words += words_of_products(model.linears())
    return words


def judge_of(model: CausalModel, info: ModelInfo, pooling: Pooling) -> Layer:
    """What makes logits of "no" and "yes". To be called before the model is prepared."""
    if not isinstance(model, Decoder):
        raise BadModelFolder(f"{info.folder}: --task score: {info.architecture} is not supported")
    ids = pooling.judged_by or token_ids(info.folder, JUDGED)
    if max(ids) >= info.vocab_size:
        raise BadModelFolder(
            f"{info.folder}: tokens to judge by are {ids}; ids are below {info.vocab_size}"
        )
    return judge_layer(model.weights.lm_head.rows(ids))


def add_tasks(
    executor: ModelExecutor,
    pooling: Pooling,
    info: ModelInfo,
    model: CausalModel,
    judged: Layer | None,
    *,
    random: bool = False,
) -> None:
    """Let an executor do what the folder is for. random: weights are drawn, not read."""
    layers = [] if judged is None else [judged]
    if pooling.labels and judged is None:
        labels = len(pooling.labels)
        layers = [classifier_layer(info, labels, model.hidden_size, random=random)]
    executor.tasks = folder_tasks(pooling, layers, random=random)
    executor.generates, executor.labels = pooling.generates, pooling.labels
    if pooling.tasks and pooling.kind != "last":
        executor.sums = PromptSums(pooling.kind)
        executor.capacity = msgspec.structs.replace(executor.capacity, task_prompts="all")


def speculate(
    executor: AnyExecutor,
    config: Config,
    device: torch.device,
    drafter: ModelDrafter | None = None,
) -> None:
    """Let an executor draft tokens where its configuration says so. drafter: what drafts, if texts
    do not. Raises ``ConfigError`` where a GPU computes without kernels of ours."""
    sizes, generates = executor.capacity, executor.generates
    drafting = make_drafting(config, sizes, generates=generates, drafter=drafter)
    if drafting is None:
        return
    source = config.speculation.speculative
    if isinstance(executor, DraftingExecutor) and device.type == "cpu":
        executor.speculate(drafting)
    else:
        from penstock.services.worker.gpu.drafting_executor import DraftingGpuExecutor

        if not isinstance(executor, DraftingGpuExecutor):
            if not config.speculation.drafts:
                return  # ``auto``
            raise ConfigError(
                f"--speculative {source}: on a GPU drafts are verified by Penstock's own kernels, "
                f"and this model is computed by {executor.summary}; use --speculative off"
            )
        executor.speculate(drafting)
    executor.summary += f"; drafts: {source}, up to {drafting.most} tokens"


def _drafter_for(
    executor: AnyExecutor, config: Config, info: ModelInfo, model: CausalModel
) -> ModelDrafter | None:
    if isinstance(executor, DraftingExecutor) and executor.generates:
        return make_drafter(config, info, model, executor.slots)
    return None


def plain_attention(model: CausalModel, block_size: int) -> AnyAttention:
    """What attends if the model has no kernels of ours."""
    kinds = dict.fromkeys(cache for cache in model.caches if cache.plain)
    return AttentionOfKinds(
        {
            cache: choose_plain_attention(cache, model.dtype, block_size, model.device)
            for cache in kinds
        }
    )


def choose_compression(kernels: DenseModel, config: Config, progress: Progress) -> Compression:
    """Compressed weights for a model that our kernels compute."""
    from penstock.services.worker.gpu.compressed_layers import compress_layers, no_compression

    if config.loading.compress_weights == "never":
        return no_compression("--compress-weights never")
    progress("compressing weights")
    with torch.inference_mode():
        share = config.cache.gpu_memory_utilization * config.cache.share()
        return compress_layers(kernels.weights, share)


def choose_device(name: str, index: int = 0) -> torch.device:
    """The device to compute on; of CUDA devices this process sees one alone. ``index``: its number
    on the machine. Raises ``ConfigError`` for a device that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        which = f"CUDA device {index} (--device-index) is not" if index else "no CUDA device is"
        raise ConfigError(f"--device cuda: {which} available; use --device cpu")
    return torch.device(name)


def choose_dtype(name: str, info: ModelInfo, device: torch.device) -> torch.dtype:
    """See ``type_name``. Raises ``BadModelFolder`` and ``ConfigError``."""
    return _DTYPES[type_name(name, info, on_cpu=device.type == "cpu")]

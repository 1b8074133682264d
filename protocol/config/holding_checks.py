"""What weights that outlive their worker do not go together with."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.protocol.config.fields import Config


def contradictions_of_holding(config: Config) -> Iterator[str]:
    """One line for each."""
    if not config.loading.hold_weights:
        return
    cluster, launch, speculation = config.cluster, config.launch, config.speculation
    refused = (
        (cluster.world_size > 1, f"--tensor-parallel-size {cluster.tensor_parallel_size} and "
         f"--pipeline-parallel-size {cluster.pipeline_parallel_size}",
         "those of a model on one device are held"),
        (launch.nodes > 1, f"--nodes {launch.nodes}", "a holder is one host's"),
        (launch.join, "--join", "a holder is one host's"),
        (launch.executor == "ray", "--executor ray", "a holder is one host's"),
        (config.loading.lora, "--lora", "weights with adapters around them are not held"),
        (launch.lora_dirs, "--lora-dirs", "weights with adapters around them are not held"),
        (speculation.by_model, f"--speculative {speculation.speculative}",
         "the weights of what drafts are not held"),
        (config.device.device == "null", "--device null", "it has no weights"),
        (config.model.model_impl == "transformers", "--model-impl transformers",
         "weights in transformers' modules are not held"),
        (cluster.router.startswith("tcp://"), f"--router {cluster.router}",
         "the holder listens beside the router's socket, which is to be an ipc:// address"),
    )  # fmt: skip
    for given, other, why in refused:
        if given:
            yield f"--hold-weights and {other} do not go together: {why}"

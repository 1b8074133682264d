"""GLM-4: half of each head is rotated, in neighbouring pairs; the 0414 series norms what attention
and MLP add, too."""

from __future__ import annotations

from penstock.protocol.model_info import ModelInfo
from penstock.services.worker.models.adapter import TensorNames
from penstock.services.worker.models.config_reader import ConfigReader
from penstock.services.worker.models.specification import Layer, ModelSpecification


class Glm4Adapter:
    architectures = ("GlmForCausalLM", "Glm4ForCausalLM")
    names = TensorNames(
        up=("mlp.gate_up_proj",),
        attention_output_norm="post_self_attn_layernorm",
        mlp_output_norm="post_mlp_layernorm",
    )

    def specification(self, info: ModelInfo) -> ModelSpecification:
        reader = ConfigReader(info)
        norm = reader.rms_norm(default_eps=1.5625e-7)
        attention = reader.attention(
            reader.rotary(head_dim=128, partial=0.5, interleaved=True),
            head_dim=128,
            qkv_bias=reader.flag("attention_bias", True),
        )
        behind = norm if info.architecture == "Glm4ForCausalLM" else None
        layer = Layer(attention, reader.mlp(), norm, norm, behind, behind)
        return reader.model([layer] * reader.num_layers, norm)

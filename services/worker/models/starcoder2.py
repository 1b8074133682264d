"""StarCoder2: layer norms, biases everywhere, an MLP without a gate, a window in all layers."""

from __future__ import annotations

from penstock.protocol.model_info import ModelInfo
from penstock.services.worker.models.adapter import TensorNames
from penstock.services.worker.models.config_reader import ConfigReader
from penstock.services.worker.models.specification import Layer, ModelSpecification, Norm


class Starcoder2Adapter:
    architectures = ("Starcoder2ForCausalLM",)
    names = TensorNames(up=("mlp.c_fc",), down="mlp.c_proj")

    def specification(self, info: ModelInfo) -> ModelSpecification:
        reader = ConfigReader(info)
        norm = Norm(reader.positive("norm_epsilon", 1e-5), "layer", bias=True)
        rotary, bias = reader.rotary(), reader.flag("use_bias", True)
        activation = reader.activation(default="gelu_pytorch_tanh")
        mlp = reader.mlp(activation=activation, bias=bias, gated=False)
        layers = []
        for window in reader.windows():
            attention = reader.attention(rotary, window=window, qkv_bias=bias, output_bias=bias)
            layers.append(Layer(attention, mlp, norm, norm))
        return reader.model(layers, norm, tied=True)

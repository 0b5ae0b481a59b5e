"""Checks the twins of Keras' models against Keras itself: the same weights must give the same logits in evaluation.

    python -m venv venv && venv/bin/pip install numpy torch torchvision keras
    venv/bin/python tools/check_twins.py

Run by hand when twins.py changes; the fixtures are made from the twins alone.
"""

import os
import re

os.environ["KERAS_BACKEND"] = "torch"
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
import keras
import torch

from fixtures import SIZES, batch, filled

MODELS = {
    "resnet50v2": "ResNet50V2", "resnet101v2": "ResNet101V2", "resnet152v2": "ResNet152V2", "mobilenet": "MobileNet",
    "inceptionv3": "InceptionV3", "inceptionresnetv2": "InceptionResNetV2", "xception": "Xception",
}
# Keras accepts no image below these.
SMALLEST = {"xception": 71}


def number(layer):
    """Layers without a name of their own are numbered in the order of their making."""
    found = re.fullmatch(r"(?:conv2d|batch_normalization)(?:_(\d+))?", layer.name)
    return None if found is None else int(found[1] or 0)


def pairs(model, twin, peer):
    """(our layer, Keras' layer) for every layer with weights."""
    ours = [name for name in twin.order]
    used = set()
    for kind in (keras.layers.Conv2D, keras.layers.BatchNormalization):
        unnamed = [layer for layer in peer.layers if type(layer) is kind and number(layer) is not None]
        unnamed.sort(key=number)
        if model == "xception":
            mine = [n for n in ours if "_residual" in n and n.endswith("_bn") == (kind is not keras.layers.Conv2D)]
        else:
            suffix = ".conv" if kind is keras.layers.Conv2D else ".bn"
            mine = [n for n in ours if n.endswith(suffix) and not n.startswith("conv_7b")
                    and not re.fullmatch(r"block\d+_\d+\.conv", n)] if "inception" in model else []
        assert len(mine) == len(unnamed), (kind, len(mine), len(unnamed))
        used.update(mine)
        yield from zip(mine, unnamed)
    for name in ours:
        if name in used:
            continue
        if name.endswith(".pointwise"):
            continue
        known = name.removesuffix(".depthwise")
        known = {"conv_7b.conv": "conv_7b", "conv_7b.bn": "conv_7b_bn"}.get(known, re.sub(r"\.conv$", "_conv", known))
        yield name, peer.get_layer(known)


def weights(twin, name):
    """The weights of one of our layers as Keras orders them."""
    module = twin.get_submodule(name)
    if isinstance(module, torch.nn.Conv2d):
        if module.groups > 1:
            out = [module.weight.permute(2, 3, 0, 1)]
            if name.endswith(".depthwise"):
                out.append(twin.get_submodule(name.replace("depthwise", "pointwise")).weight.permute(2, 3, 1, 0))
            return out
        return [module.weight.permute(2, 3, 1, 0)] + ([module.bias] if module.bias is not None else [])
    if isinstance(module, torch.nn.Linear):
        return [module.weight.T, module.bias]
    scale = [module.weight] if getattr(module, "weight", None) is not None else []
    return [*scale, module.bias, module.running_mean, module.running_var]


def main():
    keras.config.set_floatx("float64")
    for model, keras_name in MODELS.items():
        size = list(SIZES[model])
        size[1] = max(size[1], SMALLEST.get(model, 32))
        twin = filled(model, tuple(size), torch.float64).eval()
        peer = getattr(keras.applications, keras_name)(
            weights=None, input_shape=(size[1], size[1], 3), classes=10, classifier_activation=None)
        count = 0
        for name, layer in pairs(model, twin, peer):
            values = [value.detach().numpy() for value in weights(twin, name)]
            layer.set_weights(values)
            count += len(values)
        assert count == len(peer.weights), f"{model}: {count} of {len(peer.weights)} tensors were set"
        x, _ = batch(tuple(size), torch.float64, ":0")
        with torch.no_grad():
            mine = twin(x)
            theirs = torch.as_tensor(peer(x.permute(0, 2, 3, 1), training=False)).cpu()
        apart = float((mine - theirs).abs().max() / mine.abs().max())
        print(f"{model:20} {apart:.1e} apart", flush=True)
        # Not closer: with PyTorch underneath, Keras' BatchNormalization and Dense are exact to float32 only.
        assert apart < 1e-5, model


if __name__ == "__main__":
    main()

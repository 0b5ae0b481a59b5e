"""PyTorch twins of the models that torchvision does not have, with Paceline's parameter names.

Used by fixtures.py; checked against Keras itself by check_twins.py. A twin is a function of (net, x, classes); `Twin`
makes each layer the first time the function asks for it and finds it again by name afterwards.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

KERAS = dict(eps=1e-3, momentum=0.01)
KERAS_RESNET = dict(eps=1.001e-5, momentum=0.01)
TORCH = dict(eps=1e-5, momentum=0.1)


class Unscaled(nn.Module):
    """A batch normalisation that learns a shift but no scale."""

    def __init__(self, channels, eps, momentum):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("ones", torch.ones(channels), persistent=False)
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.eps, self.momentum = eps, momentum

    def forward(self, x):
        return F.batch_norm(x, self.running_mean, self.running_var, self.ones, self.bias,
                            self.training, self.momentum, self.eps)


class Twin(nn.Module):
    def __init__(self, body, classes, example):
        super().__init__()
        self.body, self.classes = body, classes
        self.order = []
        self.train()
        with torch.no_grad():
            self(example)

    def forward(self, x):
        return self.body(self, x, self.classes)

    def layer(self, name, make):
        *path, last = name.split(".")
        owner = self
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, nn.Module())
            owner = getattr(owner, part)
        if not hasattr(owner, last):
            owner.add_module(last, make())
            self.order.append(name)
        return getattr(owner, last)

    def conv(self, name, x, channels, kernel, stride=1, pad=0, groups=1, bias=False):
        """`pad` is a number, "same" as Keras means it, or (left, right, top, bottom)."""
        kernel = (kernel, kernel) if isinstance(kernel, int) else tuple(kernel)
        if pad == "same":
            pad = same(x, kernel, stride)
        if not isinstance(pad, int):
            x, pad = F.pad(x, pad), 0
        make = lambda: nn.Conv2d(x.shape[1], channels, kernel, stride, pad, groups=groups, bias=bias)
        return self.layer(name, make)(x)

    def norm(self, name, x, scale=True, **constants):
        kind = nn.BatchNorm2d if scale else Unscaled
        return self.layer(name, lambda: kind(x.shape[1], **constants))(x)

    def linear(self, name, x, outputs, bias=True):
        return self.layer(name, lambda: nn.Linear(x.shape[-1], outputs, bias))(x)

    def learned(self, name, shape):
        module = self.layer(name, nn.Module)
        if not hasattr(module, "weight"):
            module.weight = nn.Parameter(torch.zeros(shape))
        return module.weight


def same(x, kernel, stride):
    """Zeros (left, right, top, bottom) of Keras' padding "same"."""
    total = [max((math.ceil(size / stride) - 1) * stride + k - size, 0) for size, k in zip(x.shape[2:], kernel)]
    return (total[1] // 2, total[1] - total[1] // 2, total[0] // 2, total[0] - total[0] // 2)


def mlp(net, x, classes):
    x = x.flatten(1)
    x = F.relu(net.linear("fc1", x, 512))
    x = F.relu(net.linear("fc2", x, 512))
    return net.linear("fc3", x, classes)


def lenet5(net, x, classes):
    x = F.max_pool2d(F.relu(net.conv("conv1", x, 6, 5, pad=2, bias=True)), 2)
    x = F.max_pool2d(F.relu(net.conv("conv2", x, 16, 5, bias=True)), 2).flatten(1)
    x = F.relu(net.linear("fc1", x, 120))
    x = F.relu(net.linear("fc2", x, 84))
    return net.linear("fc3", x, classes)


def cnn5(net, x, classes):
    for index, (channels, halves) in enumerate(((32, True), (64, True), (128, False), (128, True), (256, False))):
        x = F.relu(net.norm(f"bn{index + 1}", net.conv(f"conv{index + 1}", x, channels, 3, pad=1), **TORCH))
        x = F.max_pool2d(x, 2) if halves else x
    return net.linear("fc", x.amax((2, 3)), classes)


def resnet9(net, x, classes):
    def unit(name, x, channels):
        return F.relu(net.norm(f"{name}bn", net.conv(f"{name}conv", x, channels, 3, pad=1), **TORCH))

    x = unit("prep.", x, 64)
    for stage, channels in (("layer1", 128), ("layer2", 256), ("layer3", 512)):
        x = F.max_pool2d(unit(f"{stage}.", x, channels), 2)
        if stage != "layer2":
            x = x + unit(f"{stage}.res2.", unit(f"{stage}.res1.", x, channels), channels)
    return net.linear("fc", x.amax((2, 3)), classes, bias=False) * 0.125


def resnet20(net, x, classes):
    x = F.relu(net.norm("bn1", net.conv("conv1", x, 16, 3, pad=1), **TORCH))
    for stage in range(3):
        for number in range(3):
            name, channels, stride = f"layer{stage + 1}.{number}", 16 << stage, 2 if stage and not number else 1
            y = F.relu(net.norm(f"{name}.bn1", net.conv(f"{name}.conv1", x, channels, 3, stride, 1), **TORCH))
            y = net.norm(f"{name}.bn2", net.conv(f"{name}.conv2", y, channels, 3, 1, 1), **TORCH)
            if stride == 2:
                x = net.norm(f"{name}.downsample.1", net.conv(f"{name}.downsample.0", x, channels, 1, 2), **TORCH)
            x = F.relu(x + y)
    return net.linear("fc", x.mean((2, 3)), classes)


def resnet_v2(blocks):
    def body(net, x, classes):
        def norm_relu(name, x):
            return F.relu(net.norm(name, x, **KERAS_RESNET))

        x = net.conv("conv1_conv", x, 64, 7, 2, (3, 3, 3, 3), bias=True)
        x = F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 2)
        for stage, count in enumerate(blocks):
            for number in range(1, count + 1):
                name, width = f"conv{stage + 2}_block{number}", 64 << stage
                stride = 2 if number == count and stage < 3 else 1
                active = norm_relu(f"{name}_preact_bn", x)
                if number == 1:
                    shortcut = net.conv(f"{name}_0_conv", active, 4 * width, 1, stride, bias=True)
                else:
                    shortcut = x[:, :, ::stride, ::stride]
                y = norm_relu(f"{name}_1_bn", net.conv(f"{name}_1_conv", active, width, 1))
                y = norm_relu(f"{name}_2_bn", net.conv(f"{name}_2_conv", y, width, 3, stride, (1, 1, 1, 1)))
                x = shortcut + net.conv(f"{name}_3_conv", y, 4 * width, 1, bias=True)
        return net.linear("predictions", norm_relu("post_bn", x).mean((2, 3)), classes)

    return body


def unit(net, name, x, channels, kernel, stride=1, pad="same"):
    """Inception's unit: convolution, normalisation without scale, ReLU."""
    x = net.conv(f"{name}.conv", x, channels, kernel, stride, pad)
    return F.relu(net.norm(f"{name}.bn", x, scale=False, **KERAS))


def chain(net, name, x, *units):
    for number, arguments in enumerate(units):
        x = unit(net, f"{name}.{number}", x, *arguments)
    return x


def average(x):
    return F.avg_pool2d(x, 3, 1, 1, count_include_pad=False)


def stem(net, x):
    x = unit(net, "stem.0", x, 32, 3, 2, 0)
    x = unit(net, "stem.1", x, 32, 3, 1, 0)
    x = F.max_pool2d(unit(net, "stem.2", x, 64, 3), 3, 2)
    x = unit(net, "stem.3", x, 80, 1)
    return F.max_pool2d(unit(net, "stem.4", x, 192, 3, 1, 0), 3, 2)


def inceptionv3(net, x, classes):
    x = stem(net, x)
    for number, pooled in enumerate((32, 64, 64)):
        m = f"mixed{number}"
        x = torch.cat([
            unit(net, f"{m}.branch1x1", x, 64, 1),
            chain(net, f"{m}.branch5x5", x, (48, 1), (64, 5)),
            chain(net, f"{m}.branch3x3dbl", x, (64, 1), (96, 3), (96, 3)),
            unit(net, f"{m}.branch_pool", average(x), pooled, 1)], 1)
    x = torch.cat([
        unit(net, "mixed3.branch3x3", x, 384, 3, 2, 0),
        chain(net, "mixed3.branch3x3dbl", x, (64, 1), (96, 3), (96, 3, 2, 0)),
        F.max_pool2d(x, 3, 2)], 1)
    wide, tall = (1, 7), (7, 1)
    for number, w in ((4, 128), (5, 160), (6, 160), (7, 192)):
        m = f"mixed{number}"
        x = torch.cat([
            unit(net, f"{m}.branch1x1", x, 192, 1),
            chain(net, f"{m}.branch7x7", x, (w, 1), (w, wide), (192, tall)),
            chain(net, f"{m}.branch7x7dbl", x, (w, 1), (w, tall), (w, wide), (w, tall), (192, wide)),
            unit(net, f"{m}.branch_pool", average(x), 192, 1)], 1)
    x = torch.cat([
        chain(net, "mixed8.branch3x3", x, (192, 1), (320, 3, 2, 0)),
        chain(net, "mixed8.branch7x7x3", x, (192, 1), (192, wide), (192, tall), (192, 3, 2, 0)),
        F.max_pool2d(x, 3, 2)], 1)
    for m in ("mixed9", "mixed10"):
        parts = [unit(net, f"{m}.branch1x1", x, 320, 1)]
        y = unit(net, f"{m}.branch3x3", x, 384, 1)
        parts += [unit(net, f"{m}.branch3x3_1", y, 384, (1, 3)), unit(net, f"{m}.branch3x3_2", y, 384, (3, 1))]
        y = chain(net, f"{m}.branch3x3dbl", x, (448, 1), (384, 3))
        parts += [unit(net, f"{m}.branch3x3dbl_1", y, 384, (1, 3)), unit(net, f"{m}.branch3x3dbl_2", y, 384, (3, 1))]
        parts += [unit(net, f"{m}.branch_pool", average(x), 192, 1)]
        x = torch.cat(parts, 1)
    return net.linear("predictions", x.mean((2, 3)), classes)


def inceptionresnetv2(net, x, classes):
    def branches(name, x, *chains):
        return [chain(net, f"{name}.branch_{number}", x, *units) for number, units in enumerate(chains)]

    def residual(name, x, scale, *chains):
        mixed = torch.cat(branches(name, x, *chains), 1)
        return x + scale * net.conv(f"{name}.conv", mixed, x.shape[1], 1, bias=True)

    x = stem(net, x)
    parts = branches("mixed_5b", x, [(96, 1)], [(48, 1), (64, 5)], [(64, 1), (96, 3), (96, 3)])
    x = torch.cat(parts + [chain(net, "mixed_5b.branch_pool", average(x), (64, 1))], 1)
    for number in range(1, 11):
        chains = [(32, 1)], [(32, 1), (32, 3)], [(32, 1), (48, 3), (64, 3)]
        x = F.relu(residual(f"block35_{number}", x, 0.17, *chains))
    parts = branches("mixed_6a", x, [(384, 3, 2, 0)], [(256, 1), (256, 3), (384, 3, 2, 0)])
    x = torch.cat(parts + [F.max_pool2d(x, 3, 2)], 1)
    for number in range(1, 21):
        chains = [(192, 1)], [(128, 1), (160, (1, 7)), (192, (7, 1))]
        x = F.relu(residual(f"block17_{number}", x, 0.1, *chains))
    chains = [(256, 1), (384, 3, 2, 0)], [(256, 1), (288, 3, 2, 0)], [(256, 1), (288, 3), (320, 3, 2, 0)]
    x = torch.cat(branches("mixed_7a", x, *chains) + [F.max_pool2d(x, 3, 2)], 1)
    for number in range(1, 11):
        chains = [(192, 1)], [(192, 1), (224, (1, 3)), (256, (3, 1))]
        x = residual(f"block8_{number}", x, 1.0 if number == 10 else 0.2, *chains)
        x = x if number == 10 else F.relu(x)
    x = unit(net, "conv_7b", x, 1536, 1)
    return net.linear("predictions", x.mean((2, 3)), classes)


def mobilenet(net, x, classes):
    def relu6(name, x):
        return F.relu6(net.norm(f"{name}_bn", x, **KERAS))

    x = relu6("conv1", net.conv("conv1", x, 32, 3, 2, "same"))
    blocks = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2)] + [(512, 1)] * 5 + [(1024, 2), (1024, 1)]
    for number, (channels, stride) in enumerate(blocks, 1):
        depth = x.shape[1]
        pad = (1, 1, 1, 1) if stride == 1 else (0, 1, 0, 1)
        x = relu6(f"conv_dw_{number}", net.conv(f"conv_dw_{number}", x, depth, 3, stride, pad, groups=depth))
        x = relu6(f"conv_pw_{number}", net.conv(f"conv_pw_{number}", x, channels, 1))
    return net.conv("conv_preds", x.mean((2, 3), keepdim=True), classes, 1, bias=True).flatten(1)


def xception(net, x, classes):
    def norm(name, x):
        return net.norm(f"{name}_bn", x, **KERAS)

    def separable(name, x, channels):
        depth = x.shape[1]
        x = net.conv(f"{name}.depthwise", x, depth, 3, 1, "same", groups=depth)
        return norm(name, net.conv(f"{name}.pointwise", x, channels, 1))

    def halving(name, x, first, second):
        shortcut = norm(f"{name}_residual", net.conv(f"{name}_residual", x, second, 1, 2, "same"))
        y = separable(f"{name}_sepconv1", x if name == "block2" else F.relu(x), first)
        y = separable(f"{name}_sepconv2", F.relu(y), second)
        y = F.max_pool2d(F.pad(y, same(y, (3, 3), 2), value=-math.inf), 3, 2)
        return y + shortcut

    x = F.relu(norm("block1_conv1", net.conv("block1_conv1", x, 32, 3, 2)))
    x = F.relu(norm("block1_conv2", net.conv("block1_conv2", x, 64, 3)))
    for name, channels in (("block2", 128), ("block3", 256), ("block4", 728)):
        x = halving(name, x, channels, channels)
    for number in range(5, 13):
        y = x
        for part in (1, 2, 3):
            y = separable(f"block{number}_sepconv{part}", F.relu(y), 728)
        x = x + y
    x = halving("block13", x, 728, 1024)
    x = F.relu(separable("block14_sepconv1", x, 1536))
    x = F.relu(separable("block14_sepconv2", x, 2048))
    return net.linear("predictions", x.mean((2, 3)), classes)


def lstm(net, x, classes):
    x = net.layer("embedding", lambda: nn.Embedding(classes, 128))(x)
    x, _ = net.layer("lstm", lambda: nn.LSTM(128, 256, num_layers=2, batch_first=True))(x)
    return net.linear("head", x.reshape(-1, 256), classes)


def gpt(net, x, classes):
    batch, sequence = x.shape
    x = net.layer("wte", lambda: nn.Embedding(classes, 128))(x) + net.learned("wpe", (sequence, 128))
    for number in range(4):
        name = f"h.{number}"
        y = net.layer(f"{name}.ln_1", lambda: nn.LayerNorm(128))(x)
        heads = net.linear(f"{name}.attn.c_attn", y, 384).view(batch, sequence, 3, 4, 32).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + net.linear(f"{name}.attn.c_proj", y.transpose(1, 2).reshape(batch, sequence, 128), 128)
        y = net.linear(f"{name}.mlp.c_fc", net.layer(f"{name}.ln_2", lambda: nn.LayerNorm(128))(x), 512)
        x = x + net.linear(f"{name}.mlp.c_proj", F.gelu(y, approximate="tanh"), 128)
    x = net.layer("ln_f", lambda: nn.LayerNorm(128))(x)
    return net.linear("lm_head", x.reshape(-1, 128), classes, bias=False)


TWINS = {
    "mlp": mlp, "lenet5": lenet5, "cnn5": cnn5, "resnet9": resnet9, "resnet20": resnet20,
    "resnet50v2": resnet_v2((3, 4, 6, 3)), "resnet101v2": resnet_v2((3, 4, 23, 3)),
    "resnet152v2": resnet_v2((3, 8, 36, 3)),
    "inceptionv3": inceptionv3, "inceptionresnetv2": inceptionresnetv2, "mobilenet": mobilenet, "xception": xception,
    "lstm": lstm, "gpt": gpt,
}

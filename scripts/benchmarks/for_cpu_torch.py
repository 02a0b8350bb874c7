"""The steps of for_cpu.py with PyTorch; started by it, under any Python.

The nets have the layers of those of the same name in ``gluon.model_zoo``.
"""

from __future__ import annotations

import argparse
import os

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("net", help="its name")
parser.add_argument("images", type=int, help="per step")
parser.add_argument("pixels", type=int, help="along each side")
OPTIONS = parser.parse_args()  # before PyTorch is needed

import torch  # noqa: E402
from rounds import serve  # noqa: E402
from torch import nn  # noqa: E402


def conv_norm(before, after, kernel=1, stride=1, groups=1, activation=None, bias=False):
    layers = [nn.Conv2d(before, after, kernel, stride, kernel // 2, groups=groups, bias=bias), nn.BatchNorm2d(after)]
    return [*layers, activation] if activation is not None else layers


class Residual(nn.Module):
    """`body` beside a shortcut."""

    def __init__(self, body, shortcut=(), activation=True):
        super().__init__()
        self.body, self.shortcut, self.activation = nn.Sequential(*body), nn.Sequential(*shortcut), activation

    def forward(self, x):
        y = self.body(x) + self.shortcut(x)
        return torch.relu(y) if self.activation else y


def mobilenet_v2():
    layers, width = conv_norm(3, 32, 3, 2, activation=nn.ReLU6()), 32
    stages = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for expand, after, num, first_stride in stages:
        for number in range(num):
            inner, stride = width * expand, first_stride if number == 0 else 1
            body = [
                *conv_norm(width, inner, activation=nn.ReLU6()),
                *conv_norm(inner, inner, 3, stride, inner, nn.ReLU6()),
                *conv_norm(inner, after),
            ]
            layers += [Residual(body, activation=False)] if number else body
            width = after
    layers += [*conv_norm(320, 1280, activation=nn.ReLU6()), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Conv2d(1280, 1000, 1, bias=False), nn.Flatten())


def resnet(nums, bottleneck):
    layers, width = [*conv_norm(3, 64, 7, 2, activation=nn.ReLU()), nn.MaxPool2d(3, 2, 1)], 64
    for stage, num in enumerate(nums):
        inner = 64 << stage
        after = 4 * inner if bottleneck else inner
        for number in range(num):
            stride = 2 if stage and not number else 1
            if bottleneck:
                body = [
                    *conv_norm(width, inner, 1, stride, activation=nn.ReLU(), bias=True),
                    *conv_norm(inner, inner, 3, activation=nn.ReLU()),
                    *conv_norm(inner, after, bias=True),
                ]
            else:
                body = [*conv_norm(width, inner, 3, stride, activation=nn.ReLU()), *conv_norm(inner, after, 3)]
            layers.append(Residual(body, conv_norm(width, after, 1, stride) if width != after or stride > 1 else ()))
            width = after
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 1000))


def vgg11_bn():
    layers, width = [], 3
    for after, num in ((64, 1), (128, 1), (256, 2), (512, 2), (512, 2)):
        for _ in range(num):
            layers += [nn.Conv2d(width, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
            width = after
        layers.append(nn.MaxPool2d(2))
    head = [nn.LazyLinear(4096), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout(0.5)]
    return nn.Sequential(*layers, nn.Flatten(), *head, nn.Linear(4096, 1000))


class Dense(nn.Module):
    """A layer whose output is appended to its input's channels."""

    def __init__(self, width, growth):
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(width), nn.ReLU(), *conv_norm(width, 4 * growth, activation=nn.ReLU()),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )  # fmt: skip

    def forward(self, x):
        return torch.cat([x, self.body(x)], 1)


def densenet121():
    layers, width = [*conv_norm(3, 64, 7, 2, activation=nn.ReLU()), nn.MaxPool2d(3, 2, 1)], 64
    for stage, num in enumerate((6, 12, 24, 16)):
        if stage:
            layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2)]
            width //= 2
        layers += [Dense(width + 32 * number, 32) for number in range(num)]
        width += 32 * num
    layers += [nn.BatchNorm2d(width), nn.ReLU(), nn.AvgPool2d(7), nn.Flatten(), nn.Linear(width, 1000)]
    return nn.Sequential(*layers)


NETS = {
    "mobilenetv2_1.0": mobilenet_v2,
    "resnet18_v1": lambda: resnet((2, 2, 2, 2), False),
    "resnet50_v1": lambda: resnet((3, 4, 6, 3), True),
    "vgg11_bn": vgg11_bn,
    "densenet121": densenet121,
}


def main():
    name, num, size = OPTIONS.net, OPTIONS.images, OPTIONS.pixels
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.manual_seed(1)
    net, loss = NETS[name](), nn.CrossEntropyLoss()
    x, y = torch.rand(num, 3, size, size), torch.arange(num)
    net(x)  # LazyLinear learns its size
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def steps(repeats):
        for _ in range(repeats):
            optimizer.zero_grad()
            value = loss(net(x), y)
            value.backward()
            optimizer.step()
            value.item()

    serve(0, {"step": steps})


if __name__ == "__main__":
    main()

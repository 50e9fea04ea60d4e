"""The shapes of a model that papers about gradient compression use."""


def resnet18_shapes() -> list[tuple[int, ...]]:
    """The paper's ResNet-18 for 10 classes and images of 32 by 32, without pooling at its entrance."""

    def convolution(outputs: int, inputs: int, size: int) -> list[tuple[int, ...]]:
        return [(outputs, inputs, size, size), (outputs,), (outputs,)]

    shapes, inputs = convolution(64, 3, 3), 64
    for outputs in (64, 128, 256, 512):
        for _ in range(2):
            shapes += convolution(outputs, inputs, 3) + convolution(outputs, outputs, 3)
            if inputs != outputs:
                shapes += convolution(outputs, inputs, 1)
            inputs = outputs
    return [*shapes, (10, 512), (10,)]

"""The small convolutional network of PyTorch's MNIST example."""

from collections import OrderedDict

from torch import nn

from hybridtrain.errors import ConfigError, setting
from hybridtrain.models.check import check_sizes, returns


@returns("log_probabilities")
def basicnet(num_classes: int = 10, image_size: int = 28, channels: int = 1) -> nn.Sequential:
    """Returns two convolutions, a max pool and two linear layers, as 12 elements.

    It takes float images of shape (N, channels, image_size, image_size) and returns
    log-probabilities of shape (N, num_classes), for `F.nll_loss`. The `state_dict` has the names of
    the original class (`conv1.weight` ... `fc2.bias`), so that each loads the other's weights.

    Source: BasicNet in Z. Mueller, *From PyTorch DDP to Accelerate to Trainer*, Hugging Face blog,
    2022, after pytorch/examples, mnist/main.py. Raises `ConfigError` if a size is not positive, or
    if images are smaller than 6 pixels, which leaves nothing after the pool.
    """
    check_sizes(num_classes=num_classes, image_size=image_size, channels=channels)
    # Each 3x3 convolution removes a pixel at every edge; the pool halves the rest.
    side = (image_size - 4) // 2
    if side < 1:
        raise ConfigError(
            f"{setting('image_size', image_size)} is too small: images need 6 pixels or more"
        )
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 32, kernel_size=3),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(32, 64, kernel_size=3),
            relu2=nn.ReLU(),
            max_pool=nn.MaxPool2d(2),
            dropout1=nn.Dropout(0.25),
            flatten=nn.Flatten(),
            fc1=nn.Linear(64 * side * side, 128),
            relu3=nn.ReLU(),
            dropout2=nn.Dropout(0.5),
            fc2=nn.Linear(128, num_classes),
            log_softmax=nn.LogSoftmax(dim=1),
        )
    )

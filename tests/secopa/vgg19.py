"""The gradients of VGG19 on images of 224 x 224, named as Gluon does: the sample of SOSP'21."""

CHANNELS = [64, 64, 128, 128, *[256] * 4, *[512] * 8]
DENSE = [512 * 7 * 7, 4096, 4096, 1000]


def gradients():
    """Names and numbers of float32, in the order of the model."""
    found = []
    for index, (have, make) in enumerate(zip([3, *CHANNELS], CHANNELS, strict=False)):
        found.append((f"vgg0_conv{index}_weight", have * make * 9))
        found.append((f"vgg0_conv{index}_bias", make))
    for index, (have, make) in enumerate(zip(DENSE, DENSE[1:], strict=False)):
        found.append((f"vgg0_dense{index}_weight", have * make))
        found.append((f"vgg0_dense{index}_bias", make))
    return found

"""Wheels with the libraries of CUDA 11; imports nothing, so that setup.py and scripts/make_venv.sh can run it.

python gluon_parallel/mxnet/cuda/wheels.py mxnet-cu112      # prints what this build of MXNet needs
"""

import sys

# library -> the wheel that brings it, in an order in which they can be loaded.
WHEELS = {
    "libcudart.so.11.0": "nvidia-cuda-runtime-cu11==11.8.89",
    "libnvToolsExt.so.1": "nvidia-nvtx-cu11==11.8.86",
    "libnvrtc.so.11.2": "nvidia-cuda-nvrtc-cu11==11.8.89",
    "libcublasLt.so.11": "nvidia-cublas-cu11==11.11.3.6",
    "libcublas.so.11": "nvidia-cublas-cu11==11.11.3.6",
    "libcufft.so.10": "nvidia-cufft-cu11==10.9.0.58",
    "libcurand.so.10": "nvidia-curand-cu11==10.3.0.86",
    "libcusparse.so.11": "nvidia-cusparse-cu11==11.7.5.86",
    "libcusolver.so.11": "nvidia-cusolver-cu11==11.4.1.48",
    "libcudnn.so.8": "nvidia-cudnn-cu11==8.9.6.50",  # newer ones are cuDNN 9, which is another library
    "libnccl.so.2": "nvidia-nccl-cu11==2.21.5",
}
# MXNet's build -> libraries above that it does not ask for.
NOT_NEEDED = {"mxnet-cu112": {"libcusparse.so.11"}, "mxnet-cu117": set()}
# The compute capabilities for which MXNet's wheels hold machine code, 86 for 8.6, which runs within one major version.
# They hold no PTX, which a driver would compile for newer cards.
CAPABILITIES = (50, 60, 70, 80, 86)


def runs_on(capability):
    """Whether a card of this compute capability can run the wheels' code.

    Example:
        >>> [runs_on(capability) for capability in (37, 50, 75, 89, 90)]
        [False, True, True, True, False]
    """
    return capability // 10 in (code // 10 for code in CAPABILITIES)


def wheels_for(build):
    """The wheels that a build of MXNet needs; none for other builds than those for CUDA 11.2 and 11.7.

    Example:
        >>> wheels_for("mxnet"), len(wheels_for("mxnet-cu112")), len(wheels_for("mxnet-cu117"))
        ([], 9, 10)
    """
    if build not in NOT_NEEDED:
        return []
    return sorted({wheel for library, wheel in WHEELS.items() if library not in NOT_NEEDED[build]})


if __name__ == "__main__":
    print(*wheels_for(sys.argv[1]))

"""Stubs that a C compiler builds: NVIDIA's driver, CUDA's libraries, and MXNet's library that asks for them."""

import os
import shutil
import subprocess

import pytest

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc, which builds the stubs")

DRIVER = """
#include <string.h>
int cuInit(unsigned flags) { if (STATUS < 0) __builtin_trap(); return STATUS; }
int cuDriverGetVersion(int *version) { *version = CUDA; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetName(char *name, int length, int device) { strncpy(name, "Stub 9000", length); return 0; }
int cuGetErrorString(int status, const char **words) { *words = "words of the driver"; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device)
{ *value = attribute == 75 ? CAPABILITY / 10 : CAPABILITY % 10; return 0; }
"""
# What MXNet calls when it computes on a GPU; its library does not load if one is missing.
CALLED = ["DevicePrimaryCtxRetain", "GraphKernelNodeGetParams", "GraphNodeGetType", "LaunchKernel", "ModuleGetFunction",
          "ModuleLoadData", "ModuleLoadDataEx", "ModuleUnload"]  # fmt: skip
NVRTC = "int nvrtcVersion(int *major, int *minor) { *major = 11; *minor = 8; return 0; }"
NO_CARD = 100  # CUDA's error


def build(path, source="", *options):
    """A shared library at `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    command = ["gcc", "-shared", "-fPIC", "-w", "-x", "c", "-", "-x", "none", "-o", str(path), *map(str, options)]
    subprocess.run(command, input=source, check=True, text=True, timeout=60)
    return path


def build_driver(folder, cuda=11080, capability=86, status=0):
    """A driver of that CUDA version with one card; returns the variables that let a process find it.

    A negative `status` makes it crash.
    """
    numbers = f"-DCUDA={cuda}", f"-DCAPABILITY={capability}", f"-DSTATUS={status}"
    build(folder / "libcuda.so.1", DRIVER + "".join(f"int cu{name}() {{ return 1; }}\n" for name in CALLED), *numbers)
    return {**os.environ, "LD_LIBRARY_PATH": str(folder)}


def build_mxnet(site, stubs, *names):
    """mxnet-cu112 in `site`, whose library asks for the libraries of these names; stubs of them lie in `stubs`."""
    libraries = [build(stubs / name, NVRTC if "nvrtc" in name else "", f"-Wl,-soname,{name}") for name in names]
    build(site / "mxnet" / "libmxnet.so", "", "-Wl,--no-as-needed", *libraries)
    (site / "mxnet" / "__init__.py").write_text('raise ImportError("MXNet was imported")\n')
    (site / "mxnet" / "libinfo.py").write_text('__version__ = "1.9.1"\n')
    (site / "mxnet_cu112-1.9.1.dist-info").mkdir(exist_ok=True)
    (site / "mxnet_cu112-1.9.1.dist-info" / "METADATA").write_text("Name: mxnet-cu112\nVersion: 1.9.1\n")
    return site / "mxnet"

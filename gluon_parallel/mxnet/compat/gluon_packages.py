"""GluonCV's and GluonNLP's modules on today's NumPy and SciPy, as they were on NumPy 1.23.

They rely on three things that are gone: ``int(array)`` of an array of one element with axes (NumPy 2.4 refuses it),
``np.asarray`` of arrays of different shapes (1.24), and ``scipy.interpolate.interp2d`` (SciPy 1.14). Their modules see
a NumPy, and numbers' types, that still do the first two; no other module does.
"""

import builtins
import functools
import types
import warnings

import numpy as np

from .after_import import Change

_PACKAGES = ("gluoncv", "gluonnlp")


class _NumberOfArray(type):
    """Type of classes that stand for ``int`` and ``float``, and convert arrays of one element as NumPy did."""

    def __call__(cls, *args, **kwargs):
        if args and isinstance(args[0], np.ndarray) and args[0].size == 1:
            args = (args[0].item(), *args[1:])
        return cls.__mro__[1](*args, **kwargs)

    def __instancecheck__(cls, instance):
        return isinstance(instance, cls.__mro__[1])

    def __subclasscheck__(cls, subclass):
        return issubclass(subclass, cls.__base__ or ())

    def __eq__(cls, other):
        return other is cls or other is cls.__base__

    def __hash__(cls):
        return hash(cls.__base__)


def _standing_for(kind):
    """A class that is used as `kind` is: called, compared, and as a dtype."""
    return _NumberOfArray(kind.__name__, (kind,), {"dtype": np.dtype(kind), "__doc__": kind.__doc__})


def _taking_ragged(function):
    """``np.array`` or ``np.asarray``, which makes an array of objects of what has no one shape."""

    @functools.wraps(function)
    def take(*args, **kwargs):
        try:
            return function(*args, **kwargs)
        except ValueError as error:
            if "inhomogeneous" not in str(error) or len(args) > 1 or kwargs.get("dtype") is not None:
                raise
            return function(*args, **{**kwargs, "dtype": object})

    return take


def _refuses(function, error):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some NumPys announce the refusal
        try:
            function()
        except error:
            return True
    return False


def changes():
    """What modules of these packages, and SciPy's, get that this NumPy and SciPy lack, by the modules' names."""
    before = after = None
    if _refuses(lambda: int(np.ones(1)), TypeError):
        # Python's names for these modules alone: globals would be exported by `from module import *`.
        own = {**vars(builtins), "int": _standing_for(int), "float": _standing_for(float)}
        before = functools.partial(_give_types, own)
    if _refuses(lambda: np.asarray([[1], [2, 3]]), ValueError):
        namespace = types.ModuleType("numpy")
        vars(namespace).update({**vars(np), "array": _taking_ragged(np.array), "asarray": _taking_ragged(np.asarray)})
        after = functools.partial(_use, namespace)
    of_packages = dict.fromkeys((f"{name}.*" for name in _PACKAGES), Change(before, after)) if before or after else {}
    return {**of_packages, "scipy.interpolate": Change(None, _restore_interp2d)}


def _give_types(own, module):
    module.__builtins__ = own


def _use(namespace, module):
    for name in [name for name, value in vars(module).items() if value is np]:
        setattr(module, name, namespace)


def _restore_interp2d(interpolate):
    """Put ``interp2d`` back where SciPy has only its name left."""
    if _refuses(lambda: interpolate.interp2d([0, 1], [0, 1], [[0, 0], [0, 0]]), (AttributeError, NotImplementedError)):
        interpolate.interp2d = interp2d


class interp2d:
    """Interpolation of values on a grid, with the arguments and results of SciPy's class of this name.

    Args:
        x, y: the grid's coordinates, of n and m values.
        z: the values, of shape (m, n).
        kind: ``"linear"``, ``"cubic"`` or ``"quintic"``.
        copy: ignored.
        bounds_error: whether points outside of the grid are refused.
        fill_value: the value outside of the grid; None: that of the nearest point of it.

    Raises:
        ValueError: shapes do not fit, `kind` is another word, or points are outside and `bounds_error` is true.

    Example:
        >>> f = interp2d([0, 1], [0, 2], [[0, 1], [2, 3]], fill_value=-1.0)
        >>> [[round(float(value), 6) for value in row] for row in f([0.5, 4], [0, 1])]
        [[0.5, -1.0], [1.5, -1.0]]
    """

    def __init__(self, x, y, z, kind="linear", copy=True, bounds_error=False, fill_value=None):
        from scipy.interpolate import RectBivariateSpline

        degrees = {"linear": 1, "cubic": 3, "quintic": 5}
        if kind not in degrees:
            raise ValueError(f"interp2d: kind is {kind!r}, expected one of {', '.join(degrees)}")
        x, y, z = np.ravel(x), np.ravel(y), np.asarray(z)
        if z.size != x.size * y.size or (z.ndim == 2 and z.shape != (y.size, x.size)):
            raise ValueError(
                f"interp2d: z has shape {z.shape}, expected ({y.size}, {x.size}) for a grid; for points that are on "
                "none use scipy.interpolate.griddata"
            )
        columns, rows = np.argsort(x), np.argsort(y)
        z = z.reshape(y.size, x.size)[rows][:, columns]
        self.x, self.y, self.z = x[columns], y[rows], z
        self.bounds_error, self.fill_value = bounds_error, fill_value
        self._spline = RectBivariateSpline(self.x, self.y, z.T, kx=degrees[kind], ky=degrees[kind])

    def __call__(self, x, y, dx=0, dy=0, assume_sorted=False):
        """The values at each of the points `x` (n) and `y` (m), sorted: (m, n), or (n,) for one `y`."""
        x, y = np.atleast_1d(x), np.atleast_1d(y)
        if x.ndim != 1 or y.ndim != 1:
            raise ValueError("interp2d: x and y of the points must be 1-D")
        if not assume_sorted:
            x, y = np.sort(x), np.sort(y)
        outside = [(at < grid[0]) | (at > grid[-1]) for at, grid in ((x, self.x), (y, self.y))]
        if self.bounds_error and any(map(np.any, outside)):
            raise ValueError("interp2d: points are outside of the grid, and bounds_error is true")
        found = np.array(self._spline(x, y, dx=dx, dy=dy).T)
        if self.fill_value is not None:
            found[:, outside[0]] = found[outside[1], :] = self.fill_value
        return found[0] if len(found) == 1 else found

"""Compiled recording, as functions that Python can call."""

from gluon_parallel.engine.compiled.functions import c_callback, types
from gluon_parallel.kvstore.flight_recorder import compiled_record

_i64 = types.int64


@c_callback(_i64(_i64, _i64, _i64, _i64))
def begin(place, name, call, size):
    return compiled_record.begin(place, name, call, size)


@c_callback(types.void(_i64, _i64, _i64))
def end(place, number, is_done):
    compiled_record.end(place, number, is_done != 0)

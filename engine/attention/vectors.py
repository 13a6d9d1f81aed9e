"""Rows of float32 held in registers, for compiled CPU kernels: loaded, multiplied, summed.

numba's compiler vectorises simple loops, but it keeps no array in registers and holds back from
the widest ones. Here a value of the compiled code is a tuple of `Vector`s, one per register: the
row of one head, or the rows of several heads end to end. Each operation says which instructions it
becomes; lengths are those of tuples, so they are constants of the compiled code. On a machine with
narrower registers the back end splits a vector. bfloat16 comes as uint16 bits.

Letters: G heads taken together, D head size. `heads` is a tuple of G zeros, `lanes` of D / 8.
"""

from collections.abc import Callable
from typing import Any, cast  # neither numba nor its instruction builder has types

from llvmlite import ir
from numba import types
from numba.core.cgutils import unpack_tuple
from numba.extending import intrinsic, models, register_model
from numba.np.arrayobj import make_array

LANE_WIDTH = 8
FLOAT = ir.FloatType()
FAST = ("fast",)
BYTE = ir.IntType(8)
CACHE_LINE = 64
PREFETCH_READ = (0, 3, 1)  # a read, to be kept in every cache, of data
Codegen = tuple[Any, Callable[..., Any]]


def instructions(function: Callable[..., Codegen]) -> Callable[..., Any]:
    """An operation of the compiled code, from what gives its signature and instructions."""
    return cast(Callable[..., Any], intrinsic(function))


class Vector(types.Type):
    """`width` float32 numbers in one register."""

    def __init__(self, width: int) -> None:
        self.width = width
        super().__init__(f"Vector({width})")


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    """A `Vector` is kept as the vector it is."""

    def __init__(self, manager: Any, vector: Vector) -> None:
        vector_type = ir.VectorType(FLOAT, vector.width)
        super().__init__(manager, vector, vector_type)  # type: ignore[no-untyped-call]


@instructions
def load(_: Any, array: Any, offset: Any, heads: Any, lanes: Any) -> Codegen:
    """The G * D numbers from array[offset] on, of a flat array."""
    width = LANE_WIDTH * (1 + (lanes.count % 2 == 0))
    row = types.UniTuple(Vector(width), heads.count * lanes.count * LANE_WIDTH // width)

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, array, args)
        read = _read_float32 if isinstance(array.dtype, types.Float) else _read_bfloat16
        vectors = [read(builder, pointer, i * width, width) for i in range(row.count)]
        return context.make_tuple(builder, row, vectors)

    return row(array, offset, heads, lanes), codegen


@instructions
def store(_: Any, array: Any, offset: Any, row: Any) -> Codegen:
    """Write the row from array[offset] on, of a flat float32 array."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, array, args)
        for i, vector in enumerate(unpack_tuple(builder, args[2])):
            _write(builder, pointer, i * row.dtype.width, vector)
        return context.get_dummy_value()

    return types.void(array, offset, row), codegen


@instructions
def prefetch(_: Any, array: Any, offset: Any, lanes: Any) -> Codegen:
    """Ask for the D numbers from array[offset] on, which will be read soon."""
    row_bytes = lanes.count * LANE_WIDTH * array.dtype.bitwidth // 8

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = builder.bitcast(_pointer(context, builder, array, args), BYTE.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [BYTE.as_pointer(), *[ir.IntType(32)] * 3])
        call = builder.module.declare_intrinsic("llvm.prefetch", [BYTE.as_pointer()], kind)
        for line in range(0, row_bytes, CACHE_LINE):
            at = builder.gep(pointer, [ir.IntType(64)(line)])
            builder.call(call, [at, *(ir.IntType(32)(x) for x in PREFETCH_READ)])
        return context.get_dummy_value()

    return types.void(array, offset, lanes), codegen


@instructions
def store_dots(_: Any, array: Any, offset: Any, stride: Any, q_GD: Any, keys_4D: Any) -> Codegen:
    """Dot products of each head of q with four keys: head g's at array[offset + g * stride]."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, array, args)
        keys = [unpack_tuple(builder, k) for k in unpack_tuple(builder, args[4])]
        for g, q_D in enumerate(_heads(builder, args[3], len(keys[0]))):
            dots = _four_sums(builder, [_partial_dot(builder, q_D, k_D) for k_D in keys])
            _write(builder, pointer, builder.mul(args[2], args[2].type(g)), dots)
        return context.get_dummy_value()

    return types.void(array, offset, stride, q_GD, keys_4D), codegen


@instructions
def add_weighted(_: Any, sums_GD: Any, v_D: Any, array: Any, offset: Any, stride: Any) -> Codegen:
    """sums_GD plus v_D times each head's weight, which is array[offset + g * stride]."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        pointer = _pointer(context, builder, array, args[2:4])
        v_vectors, added = unpack_tuple(builder, args[1]), []
        for g, sums_D in enumerate(_heads(builder, args[0], len(v_vectors))):
            at = builder.gep(pointer, [builder.mul(args[4], args[4].type(g))])
            weight = _splat(builder, builder.load(at), v_vectors[0].type)
            for total, v in zip(sums_D, v_vectors, strict=True):
                added.append(builder.fadd(total, builder.fmul(weight, v, FAST), FAST))
        return context.make_tuple(builder, sums_GD, added)

    return sums_GD(sums_GD, v_D, array, offset, stride), codegen


def _pointer(context: Any, builder: Any, array: Any, args: Any) -> Any:
    """Where array[offset] lies: the first two of `args`."""
    return builder.gep(make_array(array)(context, builder, args[0]).data, [args[1]])


def _read_float32(builder: Any, pointer: Any, offset: int, width: int) -> Any:
    at = builder.gep(pointer, [ir.IntType(64)(offset)])
    return builder.load(builder.bitcast(at, ir.VectorType(FLOAT, width).as_pointer()), align=4)


def _read_bfloat16(builder: Any, pointer: Any, offset: int, width: int) -> Any:
    at = builder.gep(pointer, [ir.IntType(64)(offset)])
    short, long = (ir.VectorType(ir.IntType(size), width) for size in (16, 32))
    bits = builder.load(builder.bitcast(at, short.as_pointer()), align=2)
    shifted = builder.shl(builder.zext(bits, long), ir.Constant(long, [16] * width))
    return builder.bitcast(shifted, ir.VectorType(FLOAT, width))


def _write(builder: Any, pointer: Any, offset: Any, vector: Any) -> None:
    at = builder.gep(pointer, [ir.IntType(64)(offset) if isinstance(offset, int) else offset])
    builder.store(vector, builder.bitcast(at, vector.type.as_pointer()), align=4)


def _heads(builder: Any, row_GD: Any, num_vectors: int) -> list[list[Any]]:
    """The vectors of each head of a row of several."""
    vectors = unpack_tuple(builder, row_GD)
    return [vectors[i : i + num_vectors] for i in range(0, len(vectors), num_vectors)]


def _splat(builder: Any, value: Any, vector: Any) -> Any:
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, ir.IntType(32)(0))
    return _shuffled(builder, first, first, [0] * vector.count)


def _partial_dot(builder: Any, a_D: list[Any], b_D: list[Any]) -> Any:
    """A vector whose sum is the dot product."""
    total = builder.fmul(a_D[0], b_D[0], FAST)
    for a, b in zip(a_D[1:], b_D[1:], strict=True):
        total = builder.fadd(total, builder.fmul(a, b, FAST), FAST)
    return total


def _four_sums(builder: Any, vectors: list[Any]) -> Any:
    """The sum of each of four vectors, as one of four: a transpose that adds at each step."""
    a, b, c, d = vectors
    ab, cd = _zipped_sum(builder, a, b, 1), _zipped_sum(builder, c, d, 1)
    total = _zipped_sum(builder, ab, cd, 2)
    while total.type.count > len(vectors):
        lanes, half = range(total.type.count), total.type.count // 2
        low, high = (_shuffled(builder, total, total, x) for x in (lanes[:half], lanes[half:]))
        total = builder.fadd(low, high, FAST)
    return total


def _zipped_sum(builder: Any, a: Any, b: Any, step: int) -> Any:
    """Of each four lanes the first two plus the last two, `step` lanes of a and of b in turn.

    Step 1 makes (a0+a2 b0+b2 a1+a3 b1+b3), step 2 (a0+a2 a1+a3 b0+b2 b1+b3).
    """
    size = a.type.count
    order = [0, size, 1, size + 1] if step == 1 else [0, 1, size, size + 1]
    low = [first + lane for first in range(0, size, 4) for lane in order]
    high = [lane + 2 for lane in low]
    return builder.fadd(_shuffled(builder, a, b, low), _shuffled(builder, a, b, high), FAST)


def _shuffled(builder: Any, a: Any, b: Any, lanes: Any) -> Any:
    """These lanes of a and, counted on from there, of b."""
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(lanes)), list(lanes))
    return builder.shuffle_vector(a, b, mask)

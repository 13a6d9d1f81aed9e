"""Messages drawn from their own descriptors: all that protobuf can carry, and broken bytes."""

from google.protobuf.descriptor import FieldDescriptor
from hypothesis import strategies as st

from twophase.v1 import inference_pb2 as pb

MAX_REPEATED = 4

_TEXTS = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
    st.sampled_from(["", " ", "\0", "<|im_end|>", "\ufffe", "\u202eabc", "a" * 5000, "\U0001f600"]),
)
_WHOLES = {
    FieldDescriptor.TYPE_UINT32: 2**32 - 1,
    FieldDescriptor.TYPE_UINT64: 2**64 - 1,
}
_FLOATS = st.one_of(
    st.floats(width=32),
    st.sampled_from([0.0, -0.0, 1.0, 1e-9, 1.0001, -1.0, 3.4e38, float("nan"), float("inf")]),
)


def _scalar(field):
    if field.type in _WHOLES:
        most = _WHOLES[field.type]
        return st.one_of(st.integers(0, 600), st.integers(0, most), st.sampled_from([0, 512, most]))
    match field.type:
        case FieldDescriptor.TYPE_STRING:
            return _TEXTS
        case FieldDescriptor.TYPE_FLOAT | FieldDescriptor.TYPE_DOUBLE:
            return _FLOATS
        case FieldDescriptor.TYPE_ENUM:
            return st.integers(-1, 4) | st.integers(-(2**31), 2**31 - 1)
        case FieldDescriptor.TYPE_BOOL:
            return st.booleans()
        case FieldDescriptor.TYPE_MESSAGE:
            return messages(field.message_type._concrete_class)
    raise AssertionError(f"{field.full_name} is of a type that no strategy draws")


@st.composite
def messages(draw, message_class):
    """A message with any of its fields set; of a oneof, the last one drawn stays."""
    message = message_class()
    for field in message_class.DESCRIPTOR.fields:
        if not draw(st.booleans()):
            continue
        if field.is_repeated:
            values = draw(st.lists(_scalar(field), max_size=MAX_REPEATED))
            getattr(message, field.name).extend(values)
        elif field.type == FieldDescriptor.TYPE_MESSAGE:
            getattr(message, field.name).CopyFrom(draw(_scalar(field)))
        else:
            setattr(message, field.name, draw(_scalar(field)))
    return message


@st.composite
def nearly_valid_requests(draw):
    """A request that would be served, but for at most one field of its sampling."""
    request = pb.GenerateRequest(prompt_token_ids=pb.TokenIds(ids=draw(_plain_ids)))
    request.sampling.max_tokens = draw(st.integers(1, 8))
    odd = draw(messages(pb.SamplingParams))
    names = [field.name for field, _ in odd.ListFields()]
    if names:
        name = draw(st.sampled_from(names))
        only = pb.SamplingParams()
        only.CopyFrom(odd)
        for other in names:
            if other != name:
                only.ClearField(other)
        request.sampling.MergeFrom(only)
    return request


_plain_ids = st.lists(st.integers(3, 511), min_size=1, max_size=40)


@st.composite
def damaged(draw, whole):
    """Bytes of a message from `whole`, with a few of them changed, cut or put in."""
    data = draw(whole).SerializeToString()
    start = draw(st.integers(0, len(data)))
    end = draw(st.integers(start, len(data)))
    return data[:start] + draw(st.binary(max_size=8)) + data[end:]


def requests(message_class):
    """Bytes for a method that takes `message_class`: valid, invalid, broken."""
    whole = messages(message_class)
    if message_class is pb.GenerateRequest:
        whole = whole | nearly_valid_requests()
    elif message_class is pb.GenerateOnceRequest:
        whole = whole | nearly_valid_requests().map(lambda r: pb.GenerateOnceRequest(request=r))
    return whole.map(lambda message: message.SerializeToString()) | damaged(whole) | st.binary()

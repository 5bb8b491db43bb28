"""A shard as somebody else's worker sees it: grpcio and the .proto files, nothing of ours. Run by shard_grpc_test.c, which opened job 1:
one linear layer, 3 -> 2, two micro-batches a step, SGD with lr 0.5 and without momentum.

Usage: shard_grpc_test.py ADDRESS DESCRIPTOR_SET
"""

import queue
import sys

import grpc
import numpy
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

LR = numpy.float32(0.5)


def message_classes(path):
    with open(path, "rb") as f:
        files = descriptor_pb2.FileDescriptorSet.FromString(f.read())
    pool = descriptor_pool.DescriptorPool()
    for f in files.file:
        pool.Add(f)
    factory = message_factory.MessageFactory(pool)
    return lambda name: factory.GetPrototype(pool.FindMessageTypeByName("tally.v1." + name))


get = message_classes(sys.argv[2])
Push, Update, Refusal = get("Push"), get("Update"), get("Refusal")
channel = grpc.insecure_channel(sys.argv[1])


class Stream:
    """An Exchange. What is sent is bytes, so that anything can be."""

    def __init__(self, timeout=20):
        self.out = queue.Queue()
        self.call = channel.stream_stream("/tally.v1.Parameters/Exchange", response_deserializer=Update.FromString)(
            iter(self.out.get, None), timeout=timeout
        )

    def send(self, message):
        self.out.put(message if isinstance(message, bytes) else message.SerializeToString())
        return self

    def hello(self, rank=0, **more):
        push = Push(job=1, generation=1, **more)
        push.hello.version.major = 1
        push.hello.rank = rank
        push.hello.worker = "python"
        return self.send(push)

    def next(self):
        return next(self.call)

    def weights(self):
        update = self.next()
        assert not update.HasField("refusal"), update.refusal.reason
        return update.version, numpy.frombuffer(update.weights, "<f4")

    def close(self):
        self.out.put(None)
        for _ in self.call:
            pass
        assert self.call.code() == grpc.StatusCode.OK, self.call.details()

    def ends_with(self, code, text):
        try:
            for _ in self.call:
                pass
        except grpc.RpcError:
            pass
        assert self.call.code() == code and text in self.call.details(), (self.call.code(), self.call.details())
        self.out.put(None)


def varint(value):
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def holding(job=1):
    return channel.unary_unary(
        "/tally.v1.Parameters/Holding",
        request_serializer=get("HoldingRequest").SerializeToString,
        response_deserializer=get("HoldingReply").FromString,
    )(get("HoldingRequest")(job=job), timeout=10)


def fetch(version, job=1):
    return list(
        channel.unary_stream(
            "/tally.v1.Parameters/Fetch",
            request_serializer=get("FetchRequest").SerializeToString,
            response_deserializer=Update.FromString,
        )(get("FetchRequest")(job=job, version=version), timeout=10)
    )


def push(step, begin, end, gradient, **more):
    return Push(
        job=1,
        generation=1,
        step=step,
        leaf_begin=begin,
        leaf_end=end,
        weight=end - begin,
        gradient=gradient.astype("<f4").tobytes(),
        **more
    )


def fails(code, text, function, *args):
    try:
        function(*args)
    except grpc.RpcError as e:
        assert e.code() == code and text in e.details(), (e.code(), e.details())
        return
    raise AssertionError("it did not fail")


def check_training():
    """Weights, a step in one push, a step in two; the numbers are PyTorch's."""
    stream = Stream().hello()
    version, w = stream.weights()
    assert version == 0 and len(w) >= 8 and numpy.abs(w).max() <= 1 / numpy.sqrt(3)
    rng = numpy.random.default_rng(1)
    g = rng.standard_normal(len(w)).astype("f4")
    stream.send(push(1, 0, 2, g, loss_sum=3.5))
    version, new = stream.weights()
    assert version == 1 and (new == w - LR * (g / numpy.float32(2))).all()
    h = rng.standard_normal(len(w)).astype("f4")
    stream.send(push(2, 1, 2, h)).send(push(2, 0, 1, g)).send(push(2, 0, 1, g))
    version, newer = stream.weights()
    assert version == 2 and (newer == new - LR * ((g + h) / numpy.float32(2))).all()
    assert [len(u.weights) // 4 for u in fetch(2)] == [len(w)]
    assert fetch(1)[0].weights == new.tobytes() and fetch(2)[0].weights == newer.tobytes()
    fails(grpc.StatusCode.FAILED_PRECONDITION, "versions 1 to 2 are", fetch, 0)
    fails(grpc.StatusCode.FAILED_PRECONDITION, "versions 1 to 2 are", fetch, 3)
    fails(grpc.StatusCode.NOT_FOUND, "no job 7", fetch, 0, 7)
    fails(grpc.StatusCode.NOT_FOUND, "no job 7", holding, 7)
    reply = holding()
    assert (reply.version, reply.oldest_version, reply.pushes_applied, reply.pushes_repeated) == (2, 1, 3, 1), reply
    stream.close()
    return newer, g


def check_encodings(w, g):
    """The same push as other encoders may write it: fields in another order, unknown ones, the payload first or twice."""
    stream = Stream().hello()
    assert stream.weights()[0] == 2
    payload = b"\x7a" + varint(len(g) * 4) + g.tobytes()
    header = lambda step: Push(job=1, generation=1, step=step, leaf_begin=0, leaf_end=2, weight=1).SerializeToString()
    unknown = b"\xa0\x06\x05" + b"\xaa\x06\x03abc"  # fields 100 and 101
    wrong = b"\x7a\x04\x00\x00\x00\x00"
    for step, message in enumerate(
        [payload + header(3), header(4) + payload + unknown, unknown + header(5) + payload, header(6) + wrong + payload], 3
    ):
        stream.send(message)
        version, new = stream.weights()
        assert version == step and (new == w - LR * g).all(), step
        w = new
    stream.close()
    return w


def check_malformed(g):
    """Whatever is sent, the stream says what is wrong with it, and the shard lives on."""
    before = holding()
    text = push(7, 0, 2, g).SerializeToString()
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    for garbage in (b"\xff" * 40, b"\x08", b"\x7a\xff\xff\xff\xff\x0f", text[:-1], text[:20], b"\x73"):
        stream = Stream().hello()
        stream.weights()
        stream.send(garbage)
        stream.ends_with(invalid, "")
    Stream().send(b"\xff\xff\xff").ends_with(invalid, "")
    Stream().send(b"").ends_with(invalid, "Hello")
    Stream().send(push(7, 0, 2, g)).ends_with(invalid, "Hello")
    Stream().hello().hello().ends_with(invalid, "second Hello")
    Stream().hello(rank=4000000000).ends_with(invalid, "rank 4000000000")
    no_version = Push(job=1, generation=1)
    no_version.hello.worker = "w" * 100000
    Stream().send(no_version).ends_with(grpc.StatusCode.FAILED_PRECONDITION, "protocol 0.0")
    large = Stream().hello()
    large.weights()
    large.send(push(7, 0, 2, numpy.zeros(2 << 20)))
    large.ends_with(grpc.StatusCode.RESOURCE_EXHAUSTED, "")
    after = holding()
    assert (after.version, after.pushes_applied) == (before.version, before.pushes_applied)


def check_refusals(g):
    stream = Stream().hello()
    assert stream.weights()[0] == 6
    odd = push(7, 0, 2, g)
    odd.gradient = odd.gradient[:-1]
    nan = push(7, 0, 2, g)
    nan.weight = float("nan")
    for message, code, text in (
        (odd, "WRONG_SIZE", "bytes of gradient"),
        (nan, "WRONG_WEIGHT", "weight nan"),
        (push(7, 0, 3, g), "NOT_A_NODE", "[0, 3)"),
        (push(7, 4294967295, 0, g), "NOT_A_NODE", "[4294967295, 0)"),
        (push(8, 0, 2, g), "WRONG_STEP", "step 7 is being summed"),
        (push(18446744073709551615, 0, 2, g), "WRONG_STEP", "of a job of"),
        (push(7, 0, 2, g, slice=1), "WRONG_SLICE", "slice 1"),
    ):
        stream.send(message)
        refusal = stream.next().refusal
        assert Refusal.Code.Name(refusal.code) == code and text in refusal.reason, refusal
    stream.send(push(7, 0, 2, g))
    assert stream.weights()[0] == 7
    stream.close()


def check_comings_and_goings(g):
    """Streams that come, say nothing, and go; deadlines; one that is cancelled with a push half sent."""
    silent = [Stream() for _ in range(50)]
    for stream in silent:
        stream.call.cancel()
        stream.out.put(None)
    short = Stream(timeout=0.2).hello()
    short.weights()
    short.ends_with(grpc.StatusCode.DEADLINE_EXCEEDED, "")
    for rank in range(3):
        stream = Stream().hello(rank=rank)
        stream.weights()
        stream.send(push(8, 0, 1, g))
        stream.call.cancel()
        stream.out.put(None)
    stream = Stream().hello(rank=1)
    stream.weights()
    stream.send(push(8, 0, 1, g)).send(push(8, 1, 2, g))
    assert stream.weights()[0] == 8
    stream.close()
    assert holding().version == 8


w, g = check_training()
w = check_encodings(w, g)
check_malformed(g)
check_refusals(g)
check_comings_and_goings(g)
assert fetch(8)[0].version == 8
channel.close()
print("done")

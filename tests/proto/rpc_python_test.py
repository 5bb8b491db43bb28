"""Other people's gRPC against this server: health, reflection, calls, and requests that no honest client sends.

Run by rpc_python_test.c with the server's address. Message classes are made from what reflection answers, so nothing here is generated.
"""

import sys
import threading
import time

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory


def reflect(channel, requests, request_class, response_class):
    call = channel.stream_stream(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        request_serializer=request_class.SerializeToString,
        response_deserializer=response_class.FromString,
    )
    return list(call(iter(requests), timeout=10))


def reflection_classes():
    """The reflection service's own messages, written by hand: field numbers as in its published .proto."""
    f = descriptor_pb2.FileDescriptorProto(name="r.proto", package="r", syntax="proto3")

    def message(name, *fields):
        m = f.message_type.add(name=name)
        for number, field, kind, repeated in fields:
            d = m.field.add(name=field, number=number, label=3 if repeated else 1)
            if isinstance(kind, str):
                d.type, d.type_name = 11, ".r." + kind
            else:
                d.type = kind

    message("Ext", (1, "containing_type", 9, 0), (2, "extension_number", 5, 0))
    message(
        "Request",
        (1, "host", 9, 0),
        (3, "file_by_filename", 9, 0),
        (4, "file_containing_symbol", 9, 0),
        (5, "file_containing_extension", "Ext", 0),
        (6, "all_extension_numbers_of_type", 9, 0),
        (7, "list_services", 9, 0),
    )
    message("Files", (1, "file_descriptor_proto", 12, 1))
    message("Numbers", (1, "base_type_name", 9, 0), (2, "extension_number", 5, 1))
    message("Service", (1, "name", 9, 0))
    message("Services", (1, "service", "Service", 1))
    message("Error", (1, "error_code", 5, 0), (2, "error_message", 9, 0))
    message(
        "Response",
        (1, "valid_host", 9, 0),
        (4, "files", "Files", 0),
        (5, "numbers", "Numbers", 0),
        (6, "services", "Services", 0),
        (7, "error", "Error", 0),
    )
    oneof_request = f.message_type[1]
    oneof_request.oneof_decl.add(name="q")
    for d in oneof_request.field[1:]:
        d.oneof_index = 0
    pool = descriptor_pool.DescriptorPool()
    pool.Add(f)
    factory = message_factory.MessageFactory(pool)
    get = lambda name: factory.GetPrototype(pool.FindMessageTypeByName("r." + name))
    return get("Request"), get("Response")


def check_reflection(channel):
    Request, Response = reflection_classes()
    ask = lambda *requests: reflect(channel, requests, Request, Response)

    names = [s.name for s in ask(Request(list_services="*"))[0].services.service]
    assert sorted(names) == [
        "grpc.health.v1.Health",
        "grpc.reflection.v1alpha.ServerReflection",
        "tally.v1.Jobs",
        "tally.v1.Parameters",
    ], names

    symbols = [
        "tally.v1.Jobs",
        "tally.v1.Jobs.Submit",
        "tally.v1.Push",
        "tally.v1.Push.gradient",
        "tally.v1.Refusal.Code",
        "tally.v1.Refusal.WRONG_STEP",
        "tally.v1.JobState",
        "tally.v1.QUEUED",
        "tally.v1.rule",
        "google.protobuf.FieldOptions",
    ]
    answers = ask(*[Request(file_containing_symbol=s) for s in symbols])
    files = {}
    for symbol, answer in zip(symbols, answers):
        protos = [descriptor_pb2.FileDescriptorProto.FromString(p) for p in answer.files.file_descriptor_proto]
        assert protos, symbol
        have = {p.name for p in protos}
        for p in protos:
            assert set(p.dependency) <= have, (symbol, p.name)  # with all that it imports
            files[p.name] = p
    assert descriptor_pb2.FileDescriptorProto.FromString(
        answers[0].files.file_descriptor_proto[0]
    ).name.endswith("jobs.proto")

    by_name = ask(Request(file_by_filename="proto/jobs.proto"))[0]
    assert len(by_name.files.file_descriptor_proto) >= 3
    bad = ask(
        Request(file_by_filename="none.proto"),
        Request(file_containing_symbol="tally.v1.Job"[:-1]),
        Request(file_containing_symbol="tally.v1"),
        Request(file_containing_symbol=""),
        Request(),
        Request(all_extension_numbers_of_type="nothing"),
    )
    assert [b.error.error_code for b in bad] == [5, 5, 5, 5, 12, 5], bad
    ext = Request()
    ext.file_containing_extension.containing_type = "google.protobuf.FieldOptions"
    ext.file_containing_extension.extension_number = 50101
    with_ext, numbers = ask(ext, Request(all_extension_numbers_of_type="google.protobuf.FieldOptions"))
    assert b"rules.proto" in with_ext.files.file_descriptor_proto[0]
    assert list(numbers.numbers.extension_number) == [50101]

    pool = descriptor_pool.DescriptorPool()
    done = set()

    def add(name):
        if name not in done:
            done.add(name)
            for d in files[name].dependency:
                add(d)
            pool.Add(files[name])

    for name in files:
        add(name)
    factory = message_factory.MessageFactory(pool)
    return lambda name: factory.GetPrototype(pool.FindMessageTypeByName("tally.v1." + name))


def varint_field(number, value):
    return bytes([number << 3, value])


def text_field(number, text):
    return bytes([number << 3 | 2, len(text)]) + text.encode()


def raw(channel, method, kind="unary_unary"):
    return getattr(channel, kind)(method)  # bytes in, bytes out


def check_health(channel):
    check = raw(channel, "/grpc.health.v1.Health/Check")
    assert check(b"", timeout=10) == varint_field(1, 1)
    assert check(text_field(1, "tally.v1.Jobs"), timeout=10) == varint_field(1, 1)
    expect(grpc.StatusCode.NOT_FOUND, "no such service", lambda: check(text_field(1, "x"), timeout=10))
    watch = raw(channel, "/grpc.health.v1.Health/Watch", "unary_stream")(b"", timeout=10)
    assert next(watch) == varint_field(1, 1)
    unknown = raw(channel, "/grpc.health.v1.Health/Watch", "unary_stream")(text_field(1, "x"), timeout=10)
    assert next(unknown) == varint_field(1, 3)
    unknown.cancel()
    expect(grpc.StatusCode.INVALID_ARGUMENT, "too long", lambda: next(
        raw(channel, "/grpc.health.v1.Health/Watch", "unary_stream")(b"\x0a\xc8\x01" + b"y" * 200, timeout=10)))
    return watch


def expect(code, text, call):
    try:
        call()
    except grpc.RpcError as e:
        assert e.code() == code and text in e.details(), (e.code(), e.details())
    else:
        raise AssertionError(f"{code} was expected")


def check_hostile(channel):
    get = raw(channel, "/tally.v1.Jobs/Get")
    exchange = raw(channel, "/tally.v1.Parameters/Exchange", "stream_stream")
    invalid, unknown = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED
    for data in (b"\x08", b"\xff" * 20, text_field(1, "no number"), b"\x0b", b"\x00\x00", b"\x7a\xff\xff\xff\xff\x0f"):
        expect(invalid, "tally.v1.JobRef", lambda: get(data, timeout=10))
        expect(invalid, "tally.v1.Push", lambda: list(exchange(iter([data]), timeout=10)))
    expect(unknown, "/tally.v1.Jobs/Nothing", lambda: raw(channel, "/tally.v1.Jobs/Nothing")(b"", timeout=10))
    expect(unknown, "/tally.v1.Jobs/List", lambda: raw(channel, "/tally.v1.Jobs/List")(b"", timeout=10))
    expect(unknown, "/a/b", lambda: list(raw(channel, "/a/b", "stream_stream")(iter([b"x" * 100000] * 20), timeout=10)))
    large = bytes(5 << 20)
    exhausted = grpc.StatusCode.RESOURCE_EXHAUSTED
    expect(exhausted, "larger than max", lambda: get(large, timeout=10))
    expect(exhausted, "larger than max", lambda: list(exchange(iter([large]), timeout=10)))
    expect(unknown, "gzip", lambda: get(varint_field(1, 1), timeout=10, compression=grpc.Compression.Gzip))
    # No request, and more than one.
    expect(invalid, "without a request", lambda: list(raw(channel, "/tally.v1.Jobs/Get", "stream_stream")(iter([]), timeout=10)))
    two = raw(channel, "/tally.v1.Jobs/Get", "stream_stream")(iter([varint_field(1, 1)] * 2), timeout=10)
    assert len(list(two)) == 1
    # Calls that end before they have begun.
    for _ in range(200):
        call = exchange(iter([varint_field(1, 1)]), timeout=10)
        call.cancel()
        get.future(varint_field(1, 1), timeout=0.0001)
    assert get(varint_field(1, 41), timeout=10).startswith(varint_field(1, 42))  # all is well


def check_tally(channel, get_class):
    Push, Update, JobRef, Job = (get_class(n) for n in ("Push", "Update", "JobRef", "Job"))
    get = channel.unary_unary("/tally.v1.Jobs/Get", JobRef.SerializeToString, Job.FromString)
    assert get(JobRef(id=7), timeout=10).id == 8
    expect(grpc.StatusCode.FAILED_PRECONDITION, "na\u00efve 100%", lambda: get(JobRef(id=0), timeout=10))
    exchange = channel.stream_stream("/tally.v1.Parameters/Exchange", Push.SerializeToString, Update.FromString)
    pushes = [Push(step=n, slice=n, weight=0.5, gradient=bytes([n % 256]) * (n * n * 37)) for n in range(150)]
    updates = list(exchange(iter(pushes), timeout=30))
    assert len(updates) == len(pushes)
    for push, update in zip(pushes, updates):
        assert (update.version, update.slice, update.weights) == (push.step, push.slice, push.gradient)


def check_shutdown(watch):
    print("stop", flush=True)  # the server's cue
    assert next(watch) == varint_field(1, 2)
    # The server's text, or what a write that met the closing connection says: gRPC's client takes what it sees first.
    expect(grpc.StatusCode.UNAVAILABLE, "", lambda: next(watch))


def main():
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(sys.argv[1], options) as channel:
        check_tally(channel, check_reflection(channel))
        check_hostile(channel)
        check_shutdown(check_health(channel))
    print("done", flush=True)


if __name__ == "__main__":
    threading.Thread(target=lambda: (time.sleep(100), sys.stderr.write("too slow\n")), daemon=True).start()
    main()

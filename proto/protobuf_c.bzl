"""protobuf-c sources from .proto files, and their descriptor set with comments, embedded as a C array."""

_INCLUDE = "/usr/include"  # google/protobuf/descriptor.proto, from libprotobuf-dev

def _gen_impl(ctx):
    sources = []
    headers = []
    for src in ctx.files.srcs:
        stem = src.basename[:-len(".proto")]
        c = ctx.actions.declare_file(stem + ".pb-c.c")
        h = ctx.actions.declare_file(stem + ".pb-c.h")
        ctx.actions.run(
            executable = "/usr/bin/protoc-c",
            arguments = ["--c_out=" + ctx.bin_dir.path, "-I.", "-I" + _INCLUDE, src.path],
            inputs = ctx.files.srcs,
            outputs = [c, h],
            mnemonic = "ProtocC",
            progress_message = "protoc-c %s" % src.short_path,
        )
        sources.append(c)
        headers.append(h)
    return [DefaultInfo(files = depset(sources)), OutputGroupInfo(hdrs = depset(headers))]

_gen = rule(
    implementation = _gen_impl,
    attrs = {"srcs": attr.label_list(allow_files = [".proto"])},
)

def protobuf_c_library(name, srcs, **kwargs):
    """A cc_library of the messages and service descriptors of srcs, and of google/protobuf/descriptor.proto."""
    _gen(name = name + "_gen", srcs = srcs)
    native.filegroup(name = name + "_gen_hdrs", srcs = [":" + name + "_gen"], output_group = "hdrs")
    native.genrule(
        name = name + "_descriptor",
        outs = ["google/protobuf/descriptor.pb-c.c", "google/protobuf/descriptor.pb-c.h"],
        cmd = "/usr/bin/protoc-c --c_out=$(RULEDIR) -I%s %s/google/protobuf/descriptor.proto" % (_INCLUDE, _INCLUDE),
    )
    native.genrule(
        name = name + "_set",
        srcs = srcs,
        outs = [name + ".descriptor_set.bin"],
        cmd = "/usr/bin/protoc --include_imports --include_source_info -I. -I%s --descriptor_set_out=$@ $(SRCS)" % _INCLUDE,
    )
    native.genrule(
        name = name + "_embed",
        srcs = [name + ".descriptor_set.bin"],
        outs = ["descriptor_set.c"],
        cmd = "(echo '#include \"proto/descriptor_set.h\"';" +
              " echo 'const unsigned char tally_descriptor_set[] = {';" +
              " od -An -v -tx1 $< | sed 's/ \\([0-9a-f][0-9a-f]\\)/0x\\1,/g';" +
              " echo '};'; echo 'const size_t tally_descriptor_set_bytes = sizeof tally_descriptor_set;') > $@",
    )
    native.cc_library(
        name = name,
        srcs = [":" + name + "_gen", "google/protobuf/descriptor.pb-c.c", "descriptor_set.c"],
        hdrs = [":" + name + "_gen_hdrs", "google/protobuf/descriptor.pb-c.h", "descriptor_set.h"],
        copts = ["-Wno-conversion", "-Wno-missing-prototypes"],  # generated
        includes = ["."],  # for google/protobuf/descriptor.pb-c.h, as protoc-c includes it
        deps = ["//third_party:protobuf_c"],
        **kwargs
    )

/* The embedded descriptor set, looked into by name: what reflection answers and what registration is checked against.
 */
#include "proto/descriptors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/descriptor_set.h"

typedef Google__Protobuf__FileDescriptorProto file_proto;
typedef Google__Protobuf__DescriptorProto message_proto;
typedef Google__Protobuf__EnumDescriptorProto enum_proto;
typedef Google__Protobuf__FieldDescriptorProto field_proto;

struct rpc_descriptors {
    Google__Protobuf__FileDescriptorSet *set;
    ProtobufCBinaryData *raw; /* of each file, inside the embedded bytes */
};

static bool read_varint(const uint8_t **at, const uint8_t *end, uint64_t *ret_value)
{
    uint64_t value = 0;
    for (unsigned shift = 0; shift < 64 && *at < end; shift += 7) {
        uint8_t byte = *(*at)++;
        value |= (uint64_t)(byte & 0x7f) << shift;
        if (!(byte & 0x80)) {
            *ret_value = value;
            return true;
        }
    }
    return false;
}

/* A FileDescriptorSet is nothing but `repeated FileDescriptorProto file = 1`. */
static bool find_raw(struct rpc_descriptors *d)
{
    const uint8_t *at = tally_descriptor_set, *end = at + tally_descriptor_set_bytes;
    for (size_t i = 0; i < d->set->n_file; i++) {
        uint64_t bytes;
        if (at == end || *at++ != (1 << 3 | PROTOBUF_C_WIRE_TYPE_LENGTH_PREFIXED) || !read_varint(&at, end, &bytes) ||
            bytes > (uint64_t)(end - at))
            return false;
        d->raw[i] = (ProtobufCBinaryData){.len = (size_t)bytes, .data = (uint8_t *)(uintptr_t)at};
        at += bytes;
    }
    return at == end;
}

tally_status rpc_descriptors_new(struct rpc_descriptors **ret_descriptors, struct tally_error *err)
{
    struct rpc_descriptors *d = calloc(1, sizeof *d);
    if (!d)
        return tally_fail(err, TALLY_ENOMEM, "no memory for the descriptors");
    d->set = google__protobuf__file_descriptor_set__unpack(NULL, tally_descriptor_set_bytes, tally_descriptor_set);
    if (d->set)
        d->raw = calloc(d->set->n_file + 1, sizeof *d->raw);
    if (!d->raw || !find_raw(d)) {
        rpc_descriptors_free(d);
        return tally_fail(err, TALLY_EINTERNAL, "the embedded descriptor set cannot be read");
    }
    *ret_descriptors = d;
    return TALLY_OK;
}

void rpc_descriptors_free(struct rpc_descriptors *descriptors)
{
    if (!descriptors)
        return;
    if (descriptors->set)
        google__protobuf__file_descriptor_set__free_unpacked(descriptors->set, NULL);
    free(descriptors->raw);
    free(descriptors);
}

size_t rpc_descriptors_files(const struct rpc_descriptors *descriptors)
{
    return descriptors->set->n_file;
}

const file_proto *rpc_descriptors_file(const struct rpc_descriptors *descriptors, size_t file)
{
    return descriptors->set->file[file];
}

ProtobufCBinaryData rpc_descriptors_raw(const struct rpc_descriptors *descriptors, size_t file)
{
    return descriptors->raw[file];
}

size_t rpc_descriptors_by_name(const struct rpc_descriptors *d, const char *name)
{
    size_t i = 0;
    while (i < d->set->n_file && strcmp(d->set->file[i]->name, name) != 0)
        i++;
    return i;
}

/* ---- symbols ---- */

/* If symbol begins with the components of name, what is behind them: "" at the end, else the next component; NULL if
 * not. */
static const char *behind(const char *symbol, const char *name)
{
    if (!name || !name[0])
        return symbol;
    size_t n = strlen(name);
    if (strncmp(symbol, name, n) != 0)
        return NULL;
    if (symbol[n] == '.')
        return symbol + n + 1;
    return symbol[n] == '\0' ? symbol + n : NULL;
}

static bool is_name(const char *symbol, const char *name)
{
    return name && strcmp(symbol, name) == 0;
}

/* Values of an enum belong to the scope that the enum stands in. */
static bool in_enum(const enum_proto *e, const char *symbol)
{
    if (is_name(symbol, e->name))
        return true;
    for (size_t i = 0; i < e->n_value; i++)
        if (is_name(symbol, e->value[i]->name))
            return true;
    return false;
}

static bool in_fields(field_proto *const *fields, size_t count, const char *symbol)
{
    for (size_t i = 0; i < count; i++)
        if (is_name(symbol, fields[i]->name))
            return true;
    return false;
}

static bool in_message(const message_proto *m, const char *symbol)
{
    const char *rest = behind(symbol, m->name);
    if (!rest || rest[0] == '\0')
        return rest != NULL;
    for (size_t i = 0; i < m->n_nested_type; i++)
        if (in_message(m->nested_type[i], rest))
            return true;
    for (size_t i = 0; i < m->n_enum_type; i++)
        if (in_enum(m->enum_type[i], rest))
            return true;
    for (size_t i = 0; i < m->n_oneof_decl; i++)
        if (is_name(rest, m->oneof_decl[i]->name))
            return true;
    return in_fields(m->field, m->n_field, rest) || in_fields(m->extension, m->n_extension, rest);
}

static bool in_file(const file_proto *f, const char *symbol)
{
    const char *rest = behind(symbol, f->package);
    if (!rest || rest[0] == '\0')
        return false;
    for (size_t i = 0; i < f->n_message_type; i++)
        if (in_message(f->message_type[i], rest))
            return true;
    for (size_t i = 0; i < f->n_enum_type; i++)
        if (in_enum(f->enum_type[i], rest))
            return true;
    for (size_t i = 0; i < f->n_service; i++) {
        const char *method = behind(rest, f->service[i]->name);
        for (size_t k = 0; method && method[0] && k < f->service[i]->n_method; k++)
            if (is_name(method, f->service[i]->method[k]->name))
                return true;
        if (method && method[0] == '\0')
            return true;
    }
    return in_fields(f->extension, f->n_extension, rest);
}

size_t rpc_descriptors_by_symbol(const struct rpc_descriptors *d, const char *symbol)
{
    size_t i = 0;
    while (i < d->set->n_file && !in_file(d->set->file[i], symbol))
        i++;
    return i;
}

/* ---- extensions, of which this project has only top-level ones ---- */

static bool extends(const field_proto *field, const char *type)
{
    const char *extendee = field->extendee ? field->extendee : "";
    return strcmp(extendee[0] == '.' ? extendee + 1 : extendee, type) == 0;
}

size_t rpc_descriptors_by_extension(const struct rpc_descriptors *d, const char *type, int32_t number)
{
    size_t i = 0;
    for (; i < d->set->n_file; i++) {
        const file_proto *f = d->set->file[i];
        for (size_t k = 0; k < f->n_extension; k++)
            if (f->extension[k]->number == number && extends(f->extension[k], type))
                return i;
    }
    return i;
}

size_t rpc_descriptors_extensions(const struct rpc_descriptors *d, const char *type, int32_t *out, size_t out_max)
{
    size_t count = 0;
    for (size_t i = 0; i < d->set->n_file; i++) {
        const file_proto *f = d->set->file[i];
        for (size_t k = 0; k < f->n_extension && count < out_max; k++)
            if (extends(f->extension[k], type))
                out[count++] = f->extension[k]->number;
    }
    return count;
}

bool rpc_descriptors_method(const struct rpc_descriptors *d, const char *service, const char *method,
                            bool *ret_client_streaming)
{
    for (size_t i = 0; i < d->set->n_file; i++) {
        const file_proto *f = d->set->file[i];
        const char *rest = behind(service, f->package);
        for (size_t k = 0; rest && k < f->n_service; k++) {
            if (!is_name(rest, f->service[k]->name))
                continue;
            for (size_t m = 0; m < f->service[k]->n_method; m++) {
                if (is_name(method, f->service[k]->method[m]->name)) {
                    *ret_client_streaming = f->service[k]->method[m]->client_streaming;
                    return true;
                }
            }
        }
    }
    return false;
}

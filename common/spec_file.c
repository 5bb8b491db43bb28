#include "common/spec_file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/file.h"
#include "common/limits.h"
#include "common/spec_internal.h"

static tally_status new_file(const char *name, struct spec_file **ret_f, struct tally_error *err)
{
    struct spec_file *f = calloc(1, sizeof *f);
    if (f) {
        f->name = strdup(name);
        f->places = spec_places_new();
    }
    if (!f || !f->name || !f->places) {
        spec_close(f);
        return tally_fail(err, TALLY_ENOMEM, "%s: no memory to read it", name);
    }
    *ret_f = f;
    return TALLY_OK;
}

tally_status spec_open_text(const char *name, const char *text, size_t bytes, struct spec_file **ret_f,
                            struct tally_error *err)
{
    struct spec_file *f = NULL;
    tally_status status = new_file(name, &f, err);
    if (status != TALLY_OK)
        return status;
    status = yaml_parse(&f->arena, name, NULL, text, bytes, &f->root, err);
    if (status == TALLY_OK)
        *ret_f = f;
    else
        spec_close(f);
    return status;
}

tally_status spec_open(const char *path, struct spec_file **ret_f, struct tally_error *err)
{
    char *text = NULL;
    size_t bytes = 0;
    tally_status status = file_read(path, TALLY_JOB_FILE_MAX_BYTES, &text, &bytes, err);
    if (status == TALLY_OK)
        status = spec_open_text(path, text, bytes, ret_f, err);
    free(text);
    return status;
}

tally_status spec_read(struct spec_file *f, const ProtobufCMessageDescriptor *type, ProtobufCMessage **ret_msg,
                       struct tally_error *err)
{
    ProtobufCMessage *msg = NULL;
    tally_status status = spec_map(f, type, &msg, err);
    if (status == TALLY_OK)
        status = spec_check(f, msg, err);
    if (status == TALLY_OK) {
        *ret_msg = msg;
        return TALLY_OK;
    }
    spec_places_clear(f->places);
    if (msg)
        protobuf_c_message_free_unpacked(msg, NULL);
    return status;
}

tally_status spec_check_message(const char *name, const ProtobufCMessage *msg, struct spec_file **ret_f,
                                struct tally_error *err)
{
    struct spec_file *f = NULL;
    tally_status status = new_file(name, &f, err);
    if (status == TALLY_OK && !spec_places_walk(f->places, msg))
        status = tally_fail(err, TALLY_ENOMEM, "%s: no memory to check it", name);
    if (status == TALLY_OK)
        status = spec_check(f, msg, err);
    if (status == TALLY_OK && ret_f)
        *ret_f = f;
    else
        spec_close(f);
    return status;
}

const char *spec_name(const struct spec_file *f)
{
    return f->name;
}

void spec_close(struct spec_file *f)
{
    if (!f)
        return;
    spec_places_free(f->places);
    yaml_arena_free(&f->arena);
    free(f->name);
    free(f);
}

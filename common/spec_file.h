#ifndef COMMON_SPEC_FILE_H
#define COMMON_SPEC_FILE_H
/*
 * A YAML file read into any protobuf-c message, with the position of every value kept, so that whoever checks the
 * message later can say where it is wrong:
 *
 *     FILE:LINE:COL: model.layers[2].conv2d.kernel_size: what was wrong, what was expected
 *
 * The keys are the fields of the message; what a field may hold beyond its type is its FieldRule (proto/rules.proto).
 *
 *     struct spec_file *f = NULL;
 *     ProtobufCMessage *msg = NULL;
 *     status = spec_open("job.yaml", &f, err);
 *     status = spec_set(f, "train.optimizer.sgd.lr=0.1", err);            any number of times, before spec_read
 *     status = spec_read(f, &tally__v1__job_spec__descriptor, &msg, err);
 *     status = model_check(msg, f, err);                                  calls spec_error(f, err, layer, "name", -1,
 * ...) spec_close(f); protobuf_c_message_free_unpacked(msg, NULL);
 *
 * Not thread-safe; one thread at a time for one spec_file.
 */
#include <stddef.h>

#include <protobuf-c/protobuf-c.h>

#include "common/error.h"

struct spec_file;

/* Reads and parses the file (at most TALLY_JOB_FILE_MAX_BYTES). Errors: those of the file system, and TALLY_EINVAL with
 * the position. */
tally_status spec_open(const char *path, struct spec_file **ret_f, struct tally_error *err);

/* The same from memory; name stands where the file's name would. Nothing of text is kept. */
tally_status spec_open_text(const char *name, const char *text, size_t bytes, struct spec_file **ret_f,
                            struct tally_error *err);

/*
 * Applies "key.path=value" to the document, before spec_read: value is YAML. A step of the path is a key, or [i] behind
 * a list's key: the index from 0, or the `name` of an element: model.layers[2].linear.out_features=7,
 * model.layers[fc1].linear.bias=false. What is missing on the way is made, except elements of lists. A value that is
 * wrong is reported by spec_read, at "--set key.path".
 */
tally_status spec_set(struct spec_file *f, const char *assignment, struct tally_error *err);

/*
 * Maps the document onto a new message of this type and checks every rule. Fields that were not given keep their
 * default with has_ false. The caller owns *ret_msg (protobuf_c_message_free_unpacked(msg, NULL)); f refers to it for
 * positions, so it must not be asked about it after it was freed.
 */
tally_status spec_read(struct spec_file *f, const ProtobufCMessageDescriptor *type, ProtobufCMessage **ret_msg,
                       struct tally_error *err);

/*
 * For a message that came from elsewhere (a request): checks the same rules, and gives a spec_file without lines, whose
 * errors read "NAME: key.path: ...". Refers to msg, which stays the caller's. ret_f may be NULL where only the check is
 * wanted.
 */
tally_status spec_check_message(const char *name, const ProtobufCMessage *msg, struct spec_file **ret_f,
                                struct tally_error *err);

/*
 * Writes "FILE:LINE:COL: key.path: <text>" into err and returns TALLY_EINVAL. msg is the message that holds the value:
 * the one spec_read returned, or any inside it. field: its name in the .proto, or NULL for msg itself; index: the
 * element of a repeated field, or -1. A field that was not given is reported at its message's position. f may be NULL
 * (then no position, and only the field's name), so may msg (the whole file).
 */
tally_status spec_error(const struct spec_file *f, struct tally_error *err, const ProtobufCMessage *msg,
                        const char *field, int index, const char *format, ...) __attribute__((format(printf, 6, 7)));

/* "FILE:LINE:COL: key.path" of a value, cut to fit; parameters as spec_error. For messages that name two places. */
void spec_where(const struct spec_file *f, const ProtobufCMessage *msg, const char *field, int index, char *text,
                size_t text_bytes);

/* The file's name as given to spec_open. */
const char *spec_name(const struct spec_file *f);

/* Sets every absent scalar that has a declared default, with its has_ flag, in msg and in every message that is present
 * in it. */
tally_status spec_fill_defaults(ProtobufCMessage *msg, struct tally_error *err);

/* Whether value names an enum's value: by its label (proto/rules.proto), else its name. */
tally_status spec_enum_parse(const ProtobufCEnumDescriptor *type, const char *text, int *ret_value);
/* The label or name of an enum's value; NULL if it has none. A static string. */
const char *spec_enum_text(const ProtobufCEnumDescriptor *type, int value);

/*
 * The nearest of the names to text, if it is near enough to be what was meant (at most a third of its letters differ,
 * or it is how a name begins); else NULL.
 */
const char *spec_nearest(const char *text, const char *const *names, size_t n);

/* Accepts NULL. */
void spec_close(struct spec_file *f);
#endif

/* grpc.reflection.v1alpha: https://github.com/grpc/grpc/blob/master/doc/server-reflection.md . All of it runs on the
 * server's queue. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "proto/descriptors.h"
#include "proto/reflection.pb-c.h"
#include "proto/rpc_internal.h"

#define FILES_MAX 64      /* of one answer */
#define SERVICES_MAX 64   /* of one server */
#define EXTENSIONS_MAX 64 /* of one message type */

typedef Grpc__Reflection__V1alpha__ServerReflectionRequest reflection_request;
typedef Grpc__Reflection__V1alpha__ServerReflectionResponse reflection_response;
#define ASKS(name) GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_REQUEST__MESSAGE_REQUEST_##name
#define ANSWERS(name) GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_RESPONSE__MESSAGE_RESPONSE_##name

struct session {
    struct session *next;
    struct rpc_reflection *reflection;
    struct rpc_stream *stream;
};

struct rpc_reflection {
    const struct rpc_descriptors *descriptors;
    const struct rpc_server *server;
    struct session *sessions;
    bool stopped;
};

/* ---- answers ---- */

static void answer_error(struct rpc_stream *stream, reflection_response *response, tally_status status,
                         const char *text)
{
    Grpc__Reflection__V1alpha__ErrorResponse error = GRPC__REFLECTION__V1ALPHA__ERROR_RESPONSE__INIT;
    error.error_code = rpc_status_to_grpc(status);
    error.error_message = (char *)(uintptr_t)text;
    response->message_response_case = ANSWERS(ERROR_RESPONSE);
    response->error_response = &error;
    rpc_stream_send(stream, &response->base, NULL);
}

/* Puts a file behind those that it imports, each once. */
static void collect(const struct rpc_descriptors *d, size_t file, size_t *files, size_t *count)
{
    for (size_t i = 0; i < *count; i++)
        if (files[i] == file)
            return;
    const Google__Protobuf__FileDescriptorProto *f = rpc_descriptors_file(d, file);
    for (size_t i = 0; i < f->n_dependency; i++) {
        size_t imported = rpc_descriptors_by_name(d, f->dependency[i]);
        if (imported < rpc_descriptors_files(d))
            collect(d, imported, files, count);
    }
    if (*count < FILES_MAX)
        files[(*count)++] = file;
}

static void answer_file(const struct rpc_reflection *r, struct rpc_stream *stream, reflection_response *response,
                        size_t file)
{
    if (file == rpc_descriptors_files(r->descriptors)) {
        answer_error(stream, response, TALLY_ENOTFOUND, "not found");
        return;
    }
    size_t files[FILES_MAX], count = 0;
    ProtobufCBinaryData raw[FILES_MAX];
    collect(r->descriptors, file, files, &count);
    for (size_t i = 0; i < count; i++)
        raw[i] = rpc_descriptors_raw(r->descriptors, files[count - 1 - i]); /* the one that was asked for first */
    Grpc__Reflection__V1alpha__FileDescriptorResponse answer =
        GRPC__REFLECTION__V1ALPHA__FILE_DESCRIPTOR_RESPONSE__INIT;
    answer.n_file_descriptor_proto = count;
    answer.file_descriptor_proto = raw;
    response->message_response_case = ANSWERS(FILE_DESCRIPTOR_RESPONSE);
    response->file_descriptor_response = &answer;
    rpc_stream_send(stream, &response->base, NULL);
}

static void answer_extensions(const struct rpc_reflection *r, struct rpc_stream *stream, reflection_response *response,
                              const char *type)
{
    int32_t numbers[EXTENSIONS_MAX];
    if (rpc_descriptors_by_symbol(r->descriptors, type) == rpc_descriptors_files(r->descriptors)) {
        answer_error(stream, response, TALLY_ENOTFOUND, "no such message type");
        return;
    }
    Grpc__Reflection__V1alpha__ExtensionNumberResponse answer =
        GRPC__REFLECTION__V1ALPHA__EXTENSION_NUMBER_RESPONSE__INIT;
    answer.base_type_name = (char *)(uintptr_t)type;
    answer.n_extension_number = rpc_descriptors_extensions(r->descriptors, type, numbers, EXTENSIONS_MAX);
    answer.extension_number = numbers;
    response->message_response_case = ANSWERS(ALL_EXTENSION_NUMBERS_RESPONSE);
    response->all_extension_numbers_response = &answer;
    rpc_stream_send(stream, &response->base, NULL);
}

struct names {
    Grpc__Reflection__V1alpha__ServiceResponse services[SERVICES_MAX];
    Grpc__Reflection__V1alpha__ServiceResponse *pointers[SERVICES_MAX];
    size_t count;
};

static void add_name(const char *name, void *context)
{
    struct names *names = context;
    if (names->count == SERVICES_MAX)
        return;
    Grpc__Reflection__V1alpha__ServiceResponse *s = &names->services[names->count];
    grpc__reflection__v1alpha__service_response__init(s);
    s->name = (char *)(uintptr_t)name;
    names->pointers[names->count++] = s;
}

static void answer_services(const struct rpc_reflection *r, struct rpc_stream *stream, reflection_response *response)
{
    struct names names = {.count = 0};
    rpc_server_services(r->server, add_name, &names);
    Grpc__Reflection__V1alpha__ListServiceResponse answer = GRPC__REFLECTION__V1ALPHA__LIST_SERVICE_RESPONSE__INIT;
    answer.n_service = names.count;
    answer.service = names.pointers;
    response->message_response_case = ANSWERS(LIST_SERVICES_RESPONSE);
    response->list_services_response = &answer;
    rpc_stream_send(stream, &response->base, NULL);
}

static void on_message(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    const struct rpc_reflection *r = ((struct session *)user)->reflection;
    const struct rpc_descriptors *d = r->descriptors;
    reflection_request *q = (reflection_request *)(uintptr_t)message->header;
    reflection_response response = GRPC__REFLECTION__V1ALPHA__SERVER_REFLECTION_RESPONSE__INIT;
    response.valid_host = q->host;
    response.original_request = q;
    switch (q->message_request_case) {
    case ASKS(FILE_BY_FILENAME):
        answer_file(r, stream, &response, rpc_descriptors_by_name(d, q->file_by_filename));
        break;
    case ASKS(FILE_CONTAINING_SYMBOL):
        answer_file(r, stream, &response, rpc_descriptors_by_symbol(d, q->file_containing_symbol));
        break;
    case ASKS(FILE_CONTAINING_EXTENSION):
        answer_file(r, stream, &response,
                    rpc_descriptors_by_extension(d, q->file_containing_extension->containing_type,
                                                 q->file_containing_extension->extension_number));
        break;
    case ASKS(ALL_EXTENSION_NUMBERS_OF_TYPE):
        answer_extensions(r, stream, &response, q->all_extension_numbers_of_type);
        break;
    case ASKS(LIST_SERVICES):
        answer_services(r, stream, &response);
        break;
    default:
        answer_error(stream, &response, TALLY_EUNSUPPORTED, "no such question");
        break;
    }
    /* A client that does not read its answers is asked no more, and ended by the queue's bound if it goes on. */
    if (rpc_stream_queued_messages(stream) >= RPC_QUEUED_MESSAGES - 1)
        rpc_stream_finish(stream, TALLY_ENOMEM, "answers are not being read");
    else
        rpc_stream_grant(stream, 1);
}

/* ---- sessions ---- */

static void on_half_close(struct rpc_stream *stream, void *user)
{
    (void)user;
    rpc_stream_finish(stream, TALLY_OK, NULL);
}

static void on_end(struct rpc_stream *stream, const struct tally_error *end, void *user)
{
    (void)stream;
    (void)end;
    struct session *session = user;
    for (struct session **at = &session->reflection->sessions; *at; at = &(*at)->next) {
        if (*at == session) {
            *at = session->next;
            break;
        }
    }
    free(session);
}

static void on_open(struct rpc_stream *stream, void *user)
{
    static const struct rpc_stream_events events = {
        .on_message = on_message, .on_half_close = on_half_close, .on_end = on_end};
    static const struct rpc_stream_options options = {.credits = 1};
    struct rpc_reflection *r = user;
    struct session *session = r->stopped ? NULL : calloc(1, sizeof *session);
    if (!session) {
        rpc_stream_finish(stream, TALLY_EUNAVAIL, r->stopped ? "the server is shutting down" : "no memory");
        return;
    }
    session->reflection = r;
    session->stream = stream;
    session->next = r->sessions;
    r->sessions = session;
    rpc_stream_accept(stream, &events, session, &options);
}

struct rpc_reflection *rpc_reflection_new(const struct rpc_descriptors *descriptors)
{
    struct rpc_reflection *r = calloc(1, sizeof *r);
    if (r)
        r->descriptors = descriptors;
    return r;
}

tally_status rpc_reflection_add(struct rpc_reflection *reflection, struct rpc_server *server, struct rpc_queue *queue,
                                struct tally_error *err)
{
    static const struct rpc_method methods[] = {{.name = "ServerReflectionInfo", .on_open = on_open}};
    struct rpc_service service = {.descriptor = &grpc__reflection__v1alpha__server_reflection__descriptor,
                                  .queue = queue,
                                  .methods = methods,
                                  .method_count = 1,
                                  .user = reflection};
    reflection->server = server;
    return rpc_server_add(server, &service, err);
}

void rpc_reflection_stop(struct rpc_reflection *reflection)
{
    reflection->stopped = true;
    for (struct session *s = reflection->sessions; s; s = s->next)
        rpc_stream_finish(s->stream, TALLY_EUNAVAIL, "the server is shutting down");
}

void rpc_reflection_free(struct rpc_reflection *reflection)
{
    free(reflection);
}

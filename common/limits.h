#ifndef COMMON_LIMITS_H
#define COMMON_LIMITS_H
/* Every bound of the system, each with its reason. */

/* Protocol version (proto/jobs.proto, Version). A peer of another major is refused; a minor only adds fields. */
#define TALLY_PROTOCOL_MAJOR 1
#define TALLY_PROTOCOL_MINOR 0

/* A log line is one write(2): PIPE_BUF keeps lines of several processes whole on one pipe. */
#define TALLY_LOG_LINE_MAX 4096

/* A slice of the parameter vector: large enough that a message's fixed cost is hidden, small enough that sending overlaps computing. */
#define TALLY_SLICE_MAX_BYTES (1u << 20)

/* An RPC message: a slice and its header, with room; what is larger is refused before it is buffered. */
#define TALLY_MESSAGE_MAX_BYTES (4u << 20)

/* What one RPC message may take once it is unpacked: an empty submessage is 2 bytes on the wire and some 50 in memory. */
#define TALLY_UNPACK_MAX_BYTES (64u << 20)

/* A job file: the largest honest ones (thousands of layers) are far below. */
#define TALLY_JOB_FILE_MAX_BYTES (16u << 20)

/* Values in a job file, and how deep they nest: JobSpec needs eight levels, and whoever walks a document recurses once a level. */
#define TALLY_SPEC_VALUES_MAX (1u << 20)
#define TALLY_SPEC_DEPTH_MAX 32

/* A job's or a layer's name: it becomes part of file names (255 bytes) and of parameters' names. */
#define TALLY_NAME_MAX 200

/* Micro-batches in a step: a step's tree is walked with 32-bit leaves, and its depth bounds a worker's buffers. */
#define TALLY_MICRO_BATCHES_MAX (1u << 16)

/* Elements of one sample, or of one parameter: products of dimensions stay far inside size_t, and every byte count inside int64. */
#define TALLY_ELEMENTS_MAX ((size_t)1 << 40)

/* A safetensors header, as the format's own reader limits it. */
#define TALLY_SAFETENSORS_HEADER_MAX_BYTES (100u << 20)

/* sockaddr_un.sun_path, with its terminating zero. */
#define TALLY_UNIX_PATH_MAX 108

/* A node that is not heard of for so long is lost; it beats three times as often. */
#define TALLY_LEASE_MS 10000

#endif

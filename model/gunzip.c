#include "model/gunzip.h"

#include <inttypes.h>
#include <stdlib.h>

#include <zlib.h>

/* zlib counts in 32 bits. */
#define PIECE_MAX ((size_t)1 << 30)

struct gunzip {
    z_stream z;
    const char *name;
    size_t left;    /* of the input, not yet given to zlib */
    uint64_t total; /* bytes made so far */
    bool ended;
};

bool gunzip_detect(const unsigned char *data, size_t bytes)
{
    return bytes >= 2 && data[0] == 0x1f && data[1] == 0x8b;
}

tally_status gunzip_open(const char *name, const unsigned char *data, size_t bytes, struct gunzip **ret_g,
                         struct tally_error *err)
{
    struct gunzip *g = calloc(1, sizeof(*g));
    if (!g)
        return tally_fail(err, TALLY_ENOMEM, "%s: no memory to unpack it", name);
    g->name = name;
    g->z.next_in = (Bytef *)(uintptr_t)data; /* zlib.h's next_in is const only on request */
    g->left = bytes;
    if (inflateInit2(&g->z, 15 + 16) != Z_OK) {
        free(g);
        return tally_fail(err, TALLY_ENOMEM, "%s: no memory to unpack it", name);
    }
    *ret_g = g;
    return TALLY_OK;
}

static size_t input_left(const struct gunzip *g)
{
    return g->left + g->z.avail_in;
}

/* One member is done: there is another one, or nothing. */
static tally_status next_member(struct gunzip *g, struct tally_error *err)
{
    size_t left = input_left(g);
    if (left == 0) {
        g->ended = true;
        return TALLY_OK;
    }
    if (!gunzip_detect(g->z.next_in, left))
        return tally_fail(err, TALLY_EINVAL, "%s: %zu bytes that are not gzip follow its data", g->name, left);
    if (inflateReset(&g->z) != Z_OK)
        return tally_fail(err, TALLY_EINTERNAL, "%s: inflateReset failed", g->name);
    return TALLY_OK;
}

static tally_status inflate_piece(struct gunzip *g, unsigned char *dst, size_t bytes, size_t *ret_made,
                                  struct tally_error *err)
{
    if (g->z.avail_in == 0) {
        size_t piece = g->left < PIECE_MAX ? g->left : PIECE_MAX;
        g->z.avail_in = (uInt)piece;
        g->left -= piece;
    }
    uInt room = (uInt)(bytes < PIECE_MAX ? bytes : PIECE_MAX);
    g->z.next_out = dst;
    g->z.avail_out = room;
    int result = inflate(&g->z, Z_NO_FLUSH);
    size_t made = room - g->z.avail_out;
    g->total += made;
    *ret_made = made;
    if (result == Z_STREAM_END)
        return next_member(g, err);
    if (result == Z_OK || result == Z_BUF_ERROR) {
        if (made == 0 && input_left(g) == 0)
            return tally_fail(err, TALLY_EINVAL, "%s: the gzip file is cut off after %" PRIu64 " bytes of its data",
                              g->name, g->total);
        return TALLY_OK;
    }
    if (result == Z_MEM_ERROR)
        return tally_fail(err, TALLY_ENOMEM, "%s: no memory to unpack it", g->name);
    return tally_fail(err, TALLY_EINVAL, "%s: damaged gzip file: %s after %" PRIu64 " bytes of its data", g->name,
                      g->z.msg ? g->z.msg : "a preset dictionary", g->total);
}

tally_status gunzip_read(struct gunzip *g, void *dst, size_t bytes, size_t *ret_bytes, struct tally_error *err)
{
    size_t done = 0;
    while (done < bytes && !g->ended) {
        size_t made = 0;
        tally_status status = inflate_piece(g, (unsigned char *)dst + done, bytes - done, &made, err);
        if (status != TALLY_OK)
            return status;
        done += made;
    }
    *ret_bytes = done;
    return TALLY_OK;
}

void gunzip_close(struct gunzip *g)
{
    if (!g)
        return;
    inflateEnd(&g->z);
    free(g);
}

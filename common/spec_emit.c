#include "common/spec_emit.h"

#include <ctype.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define INDENT 2

/* Counts what it writes; without a file it only counts. */
struct sink {
    FILE *out;
    size_t n;
};

static void put(struct sink *s, const char *text, size_t n)
{
    s->n += n;
    if (s->out)
        fwrite(text, 1, n, s->out);
}

static void puts_to(struct sink *s, const char *text)
{
    put(s, text, strlen(text));
}

static void put_spaces(struct sink *s, size_t n)
{
    for (size_t i = 0; i < n; i++)
        put(s, " ", 1);
}

/* ---- scalars ---- */

/* Double quotes and escapes that JSON and YAML share. What is not UTF-8 becomes U+FFFD. */
static void put_quoted(struct sink *s, const char *text, size_t bytes)
{
    char escape[16];
    put(s, "\"", 1);
    for (size_t i = 0; i < bytes;) {
        size_t good = utf8_bad_byte(text + i, bytes - i);
        for (size_t end = i + good; i < end; i++) {
            unsigned char c = (unsigned char)text[i];
            if (c == '"' || c == '\\') {
                put(s, "\\", 1);
                put(s, text + i, 1);
            } else if (c == '\n') {
                puts_to(s, "\\n");
            } else if (c == '\t') {
                puts_to(s, "\\t");
            } else if (c < 0x20 || c == 0x7f) {
                snprintf(escape, sizeof escape, "\\u%04x", c);
                puts_to(s, escape);
            } else if (c == 0xc2 && (unsigned char)text[i + 1] < 0xa0) {
                /* C1 control characters (NEL is a line break in YAML) */
                snprintf(escape, sizeof escape, "\\u%04x", (unsigned char)text[++i]);
                puts_to(s, escape);
            } else if (c == 0xe2 && (unsigned char)text[i + 1] == 0x80 && ((unsigned char)text[i + 2] & 0xfe) == 0xa8) {
                /* U+2028 and U+2029 are line breaks in YAML 1.1 */
                snprintf(escape, sizeof escape, "\\u20%02x", (unsigned char)text[i + 2] - 0x80);
                puts_to(s, escape);
                i += 2;
            } else if (c == 0xef && (unsigned char)text[i + 1] == 0xbb && (unsigned char)text[i + 2] == 0xbf) {
                puts_to(s, "\\ufeff");
                i += 2;
            } else {
                put(s, text + i, 1);
            }
        }
        if (i < bytes) {
            puts_to(s, "\xef\xbf\xbd");
            i++;
        }
    }
    put(s, "\"", 1);
}

/* Whether a string may stand without quotes: no YAML reader, of whichever version, takes it for anything else. */
static bool is_safe_plain(const char *text, size_t bytes)
{
    static const char *const words[] = {"true", "false", "yes", "no",  "on",  "off",
                                        "null", "y",     "n",   "inf", "nan", "none"};
    bool letter = false;
    if (bytes == 0 || !(isalnum((unsigned char)text[0]) || text[0] == '_' || text[0] == '/' ||
                        strncmp(text, "./", 2) == 0 || strncmp(text, "../", 3) == 0))
        return false;
    for (size_t i = 0; i < bytes; i++) {
        unsigned char c = (unsigned char)text[i];
        if (!isalnum(c) && !strchr("_./-", c))
            return false;
        /* 1e5, 0x10, 0o7, 0b1 and 1_000 are numbers somewhere; 1f1b is none anywhere */
        letter = letter || (isalpha(c) && !strchr("eExXoObB", c));
    }
    if (isdigit((unsigned char)text[0]) && (!letter || text[0] == '0'))
        return false;
    /* `none` is a word of ours (Gelu) and of nobody's YAML. */
    for (size_t i = 0; i + 1 < sizeof words / sizeof words[0]; i++) {
        if (strcasecmp(text, words[i]) == 0)
            return false;
    }
    return true;
}

static bool is_special(const struct yaml_node *n)
{
    return n->plain && (strcmp(n->text, "nan") == 0 || strcmp(n->text, "inf") == 0 || strcmp(n->text, "-inf") == 0);
}

static void put_yaml_scalar(struct sink *s, const struct yaml_node *n)
{
    if (is_special(n)) {
        puts_to(s, n->text[0] == '-' ? "-." : ".");
        puts_to(s, n->text[0] == '-' ? n->text + 1 : n->text);
    } else if (n->plain || is_safe_plain(n->text, n->text_bytes)) {
        put(s, n->text, n->text_bytes);
    } else {
        put_quoted(s, n->text, n->text_bytes);
    }
}

/* ---- YAML ---- */

static void put_flow(struct sink *s, const struct yaml_node *n)
{
    if (n->kind == YAML_SCALAR) {
        put_yaml_scalar(s, n);
        return;
    }
    puts_to(s, n->kind == YAML_MAP ? "{" : "[");
    for (size_t i = 0; i < n->count; i++) {
        if (i > 0)
            puts_to(s, ", ");
        if (n->kind == YAML_MAP) {
            put_yaml_scalar(s, n->items[i].key);
            puts_to(s, ": ");
        }
        put_flow(s, n->items[i].value);
    }
    puts_to(s, n->kind == YAML_MAP ? "}" : "]");
}

static bool holds_maps(const struct yaml_node *list)
{
    for (size_t i = 0; i < list->count; i++) {
        if (list->items[i].value->kind == YAML_MAP)
            return true;
    }
    return false;
}

/* Short inner mappings and lists stand in one line; the file's sections, and lists of mappings, one element a line. */
static bool in_one_line(const struct yaml_node *n, size_t depth, size_t column)
{
    if (n->kind == YAML_SCALAR || n->count == 0)
        return true;
    if ((n->kind == YAML_MAP && depth < 2) || (n->kind == YAML_LIST && holds_maps(n)))
        return false;
    struct sink counter = {NULL, 0};
    put_flow(&counter, n);
    return column + counter.n <= SPEC_LINE_WIDTH;
}

static void put_block(struct sink *s, const struct yaml_node *n, size_t depth, size_t indent, bool first_indented)
{
    for (size_t i = 0; i < n->count; i++) {
        const struct yaml_node *value = n->items[i].value;
        size_t before = s->n;
        if (i > 0 || !first_indented)
            put_spaces(s, indent);
        if (n->kind == YAML_MAP) {
            put_yaml_scalar(s, n->items[i].key);
            puts_to(s, ":");
        } else {
            puts_to(s, "-");
        }
        if (in_one_line(value, depth, s->n - before + 1 + (i == 0 && first_indented ? indent : 0))) {
            puts_to(s, " ");
            put_flow(s, value);
            puts_to(s, "\n");
        } else if (n->kind == YAML_LIST && value->kind == YAML_MAP) {
            puts_to(s, " ");
            put_block(s, value, depth + 1, indent + INDENT, true);
        } else {
            puts_to(s, "\n");
            put_block(s, value, depth + 1, indent + INDENT, false);
        }
    }
}

void emit_yaml(FILE *out, const struct yaml_node *root)
{
    struct sink s = {out, 0};
    if (root->kind == YAML_SCALAR || root->count == 0) {
        put_flow(&s, root);
        puts_to(&s, "\n");
        return;
    }
    put_block(&s, root, 1, 0, false);
}

/* ---- JSON ---- */

static bool holds_scalars(const struct yaml_node *n)
{
    for (size_t i = 0; i < n->count; i++) {
        if (n->items[i].value->kind != YAML_SCALAR)
            return false;
    }
    return n->kind == YAML_LIST;
}

static void put_json(struct sink *s, const struct yaml_node *n, bool compact, size_t indent)
{
    if (n->kind == YAML_SCALAR) {
        if (is_special(n))
            puts_to(s, "null");
        else if (n->plain)
            put(s, n->text, n->text_bytes);
        else
            put_quoted(s, n->text, n->text_bytes);
        return;
    }
    bool one_line = compact || holds_scalars(n) || n->count == 0;
    puts_to(s, n->kind == YAML_MAP ? "{" : "[");
    for (size_t i = 0; i < n->count; i++) {
        if (i > 0)
            puts_to(s, one_line && !compact ? ", " : ",");
        if (!one_line) {
            puts_to(s, "\n");
            put_spaces(s, indent + INDENT);
        }
        if (n->kind == YAML_MAP) {
            put_quoted(s, n->items[i].key->text, n->items[i].key->text_bytes);
            puts_to(s, compact ? ":" : ": ");
        }
        put_json(s, n->items[i].value, compact, indent + INDENT);
    }
    if (!one_line) {
        puts_to(s, "\n");
        put_spaces(s, indent);
    }
    puts_to(s, n->kind == YAML_MAP ? "}" : "]");
}

void emit_json(FILE *out, const struct yaml_node *root, bool compact)
{
    struct sink s = {out, 0};
    put_json(&s, root, compact, 0);
    puts_to(&s, "\n");
}

static json_t *jansson_scalar(const struct yaml_node *n)
{
    if (!n->plain)
        return json_stringn(n->text, n->text_bytes);
    if (is_special(n))
        return json_null();
    if (strcmp(n->text, "true") == 0 || strcmp(n->text, "false") == 0)
        return json_boolean(n->text[0] == 't');
    char *end = NULL;
    errno = 0;
    long long whole = strtoll(n->text, &end, 10);
    /* jansson has no unsigned integers: those above INT64_MAX become reals. */
    if (*end == '\0' && errno == 0)
        return json_integer(whole);
    return json_real(strtod(n->text, NULL));
}

json_t *emit_jansson(const struct yaml_node *root)
{
    if (root->kind == YAML_SCALAR)
        return jansson_scalar(root);
    json_t *json = root->kind == YAML_MAP ? json_object() : json_array();
    for (size_t i = 0; json && i < root->count; i++) {
        json_t *value = emit_jansson(root->items[i].value);
        int failed = root->kind == YAML_MAP ? json_object_set_new(json, root->items[i].key->text, value)
                                            : json_array_append_new(json, value);
        if (failed) {
            json_decref(json);
            json = NULL;
        }
    }
    return json;
}

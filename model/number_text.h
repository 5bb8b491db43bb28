#ifndef MODEL_NUMBER_TEXT_H
#define MODEL_NUMBER_TEXT_H
/* A decimal number in text that need not end with a zero byte, read alike in every locale. */
#include <stdbool.h>
#include <stddef.h>

/* [+-] digits [. digits] [e [+-] digits] and nothing else, with a digit before or behind the point; rounded to the
 * nearest double (infinite beyond them). False: not such a number, or longer than 512 bytes. */
bool number_text_parse(const unsigned char *text, size_t bytes, double *ret_value);
#endif

/* elementwise.h against libm in double: how far off, in units of the last place, and what NaN and infinities give. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include <math.h>

#include "kernels/elementwise.h"

static float call_exp(float x)
{
    return elementwise_exp(x);
}

static float call_tanh(float x)
{
    return elementwise_tanh(x);
}

static float call_sigmoid(float x)
{
    return elementwise_sigmoid(x);
}

static float call_erf(float x)
{
    return elementwise_erf(x);
}

static double exact_sigmoid(double x)
{
    return x >= 0 ? 1 / (1 + exp(-x)) : exp(x) / (1 + exp(x));
}

/* The distance from one float to the next at x. */
static double ulp(double x)
{
    const float f = (float)fabs(x);
    const double step = (double)nextafterf(f, INFINITY) - (double)f;
    return step > 0x1p-149 ? step : 0x1p-149;
}

struct function {
    const char *name;
    float (*got)(float x);
    double (*expected)(double x);
    float low, high; /* measured between */
};

static void functions_are_within_4_ulp(void **state)
{
    (void)state;
    static const struct function functions[] = {
        {"exp", call_exp, exp, -104, 89},
        {"tanh", call_tanh, tanh, -12, 12},
        {"sigmoid", call_sigmoid, exact_sigmoid, -87, 87},
        {"erf", call_erf, erf, -6, 6},
    };
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++) {
        const struct function *f = &functions[i];
        double worst = 0;
        const size_t steps = 400000;
        for (size_t s = 0; s <= steps; s++) {
            const float even = f->low + (f->high - f->low) * (float)s / (float)steps;
            const float small = ldexpf(even, -(int)(s % 30)); /* and down to small numbers */
            const float points[2] = {even, small};
            for (int p = 0; p < 2; p++) {
                const double e = f->expected((double)points[p]), g = (double)f->got(points[p]);
                if (e > 3.4028234663852886e38) {
                    assert_true(g == (double)INFINITY);
                    continue;
                }
                const double off = fabs(e - g) / ulp(e);
                worst = off > worst ? off : worst;
            }
        }
        print_message("%s: %.2f ulp\n", f->name, worst);
        assert_true(worst <= 4);
    }
}

static void special_values_give_limits(void **state)
{
    (void)state;
    const float nan_ = NAN, inf = INFINITY;
    assert_true(isnan(elementwise_exp(nan_)) && isnan(elementwise_tanh(nan_)) && isnan(elementwise_sigmoid(nan_)) &&
                isnan(elementwise_erf(nan_)));
    assert_true(isnan(elementwise_gelu_erf(nan_)) && isnan(elementwise_gelu_tanh(nan_)) &&
                isnan(elementwise_relu(nan_)));
    assert_true(elementwise_exp(inf) == inf && elementwise_exp(-inf) == 0 && elementwise_exp(0) == 1);
    assert_true(elementwise_tanh(inf) == 1 && elementwise_tanh(-inf) == -1 && elementwise_tanh(0) == 0);
    assert_true(signbit(elementwise_tanh(-0.0f)) != 0);
    assert_true(elementwise_sigmoid(inf) == 1 && elementwise_sigmoid(-inf) == 0 && elementwise_sigmoid(0) == 0.5f);
    assert_true(elementwise_erf(inf) == 1 && elementwise_erf(-inf) == -1 && elementwise_erf(0) == 0);
    assert_true(elementwise_gelu_erf(inf) == inf && elementwise_gelu_tanh(inf) == inf);
    assert_true(elementwise_relu_backward(2, nan_) == 2 && elementwise_relu_backward(2, 0) == 0);
    assert_true(elementwise_tanh(1e-30f) == 1e-30f && elementwise_erf(1e-38f) > 0);
}

static double sgd_reference(double g, double w, double *m, double lr, double mu, double damp, double wd, bool nesterov,
                            bool maximize, bool first)
{
    double d = maximize ? -g : g;
    d += wd * w;
    if (mu != 0) {
        *m = first ? d : mu * *m + (1 - damp) * d;
        d = nesterov ? d + mu * *m : *m;
    }
    return w - lr * d;
}

static void sgd_follows_the_formula(void **state)
{
    (void)state;
    for (int options = 0; options < 64; options++) {
        const double mu = options & 1 ? 0.9 : 0, damp = options & 2 ? 0.3 : 0, wd = options & 4 ? 0.05 : 0, lr = 0.1;
        const bool nesterov = options & 8, maximize = options & 16, first = options & 32;
        const float g = 0.7f, w = -1.3f, m = 0.4f;
        double m_expected = (double)m;
        const double w_expected =
            sgd_reference((double)g, (double)w, &m_expected, lr, mu, damp, wd, nesterov, maximize, first);
        float m_got;
        const float w_got = elementwise_sgd(g, w, m, (float)lr, (float)mu, 1 - (float)damp, (float)wd, mu != 0,
                                            nesterov, maximize, first, &m_got);
        assert_true(fabs(w_expected - (double)w_got) < 1e-6);
        if (mu != 0)
            assert_true(fabs(m_expected - (double)m_got) < 1e-6);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(functions_are_within_4_ulp),
        cmocka_unit_test(special_values_give_limits),
        cmocka_unit_test(sgd_follows_the_formula),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}

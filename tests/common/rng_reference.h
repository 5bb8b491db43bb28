/* Made by tests/reference/rng_reference.py with torch 2.15.0, AVX512. */
#include <stdint.h>

static const uint32_t torch_u31_seed_0[] = {
    209652396u, 398764591u, 924231285u, 1478610112u, 441365315u, 1537364731u, 192771779u, 1491434855u,
    1819583497u, 530702035u, 626610453u, 1650906866u, 1879422756u, 1277901399u, 1682652230u, 243580376u,
};

static const uint32_t torch_u31_seed_3[] = {
    218175338u, 303761048u, 893988089u, 1460070019u, 1249426360u, 521102280u, 46504192u, 297689877u,
    1687694333u, 1877166739u, 1702065866u, 80522091u, 539384825u, 174507689u, 890101386u, 1064672149u,
};

static const uint32_t torch_u31_seed_4294967295[] = {
    419326371u, 479346978u, 1771170828u, 269265991u, 1241397172u, 113049152u, 1202606294u, 1162281466u,
    77050329u, 1217888032u, 2016512639u, 18838139u, 400185074u, 839661675u, 627568395u, 856107210u,
};

static const uint32_t torch_u31_seed_low_bits_5[] = {
    953453411u, 236996814u, 1592283119u, 1423042237u,
};

static const uint64_t torch_u63_seed_3[] = {
    UINT64_C(937055941807507096), UINT64_C(3839649608876091011), UINT64_C(5366245355481424840), UINT64_C(199733986212078357), UINT64_C(7248591967756700307), UINT64_C(7310317230188440427), UINT64_C(2316640183508190889), UINT64_C(3822956344058944405),
};

static const uint32_t torch_uniform_seed_3[] = {
    0xbe4b0dbdu, 0xbe218f0du, 0xbdaf7017u, 0xbe41c262u, 0xbc3a0733u, 0xbe342d27u, 0x3ddeb667u, 0x3dc7a377u,
    0x3d1ab320u, 0x3e1eddb8u, 0xbca075e7u, 0x3df557bdu, 0xbe0f6cd8u, 0xbd216efau, 0xbe369bf0u, 0xbc85055au,
};

static const uint32_t torch_uniform_odd_bounds[] = {
    0xbe9a70b6u, 0x3ee71dc3u, 0x3fe54d8cu, 0xbe08290eu, 0x404b0783u, 0x3de882fdu, 0x40acef3bu, 0x40a63c10u,
    0x4082b9f0u, 0x40c8865cu, 0x40413cc0u, 0x40b38169u, 0x3f47cdccu, 0x4029a8a5u, 0x3d8e180eu, 0x40453897u,
};

#define TORCH_MODEL_W1 UINT64_C(0x1bdc797dd62998c7)
#define TORCH_MODEL_B1 UINT64_C(0x07a0c6d21f194921)
#define TORCH_MODEL_W2 UINT64_C(0x1e40cc648380e94d)
#define TORCH_MODEL_B2 UINT64_C(0x80ab665a2cf22976)
#define TORCH_MODEL_W3 UINT64_C(0x2e4825d290349236)
#define TORCH_MODEL_B3 UINT64_C(0xc449b19fe3570b2a)
#define TORCH_MODEL_W4 UINT64_C(0x4091f84901a3edfe)
#define TORCH_MODEL_B4 UINT64_C(0xf61fe638537d93a7)

static const uint32_t torch_loader_epoch_1[] = {
    60u, 50u, 51u, 34u, 28u, 26u, 74u, 87u,
    55u, 22u, 54u, 92u, 42u, 25u, 70u, 91u,
    40u, 85u, 4u, 19u, 3u, 23u, 24u, 15u,
    80u, 72u, 89u, 29u, 95u, 17u, 78u, 77u,
    35u, 31u, 79u, 84u, 41u, 76u, 63u, 46u,
    30u, 48u, 61u, 58u, 39u, 43u, 56u, 81u,
    7u, 52u, 97u, 64u, 86u, 6u, 96u, 18u,
    2u, 32u, 44u, 5u, 8u, 49u, 37u, 12u,
    13u, 36u, 93u, 67u, 14u, 82u, 90u, 21u,
    66u, 62u, 47u, 94u, 59u, 53u, 20u, 38u,
    75u, 99u, 27u, 71u, 98u, 57u, 9u, 0u,
    83u, 10u, 45u, 73u, 1u, 68u, 11u, 88u,
    16u, 33u, 65u, 69u,
};

static const uint32_t torch_loader_epoch_2[] = {
    85u, 57u, 68u, 34u, 80u, 67u, 71u, 98u,
    81u, 24u, 96u, 43u, 25u, 29u, 79u, 84u,
    86u, 91u, 11u, 72u, 63u, 27u, 45u, 97u,
    1u, 60u, 59u, 8u, 22u, 35u, 19u, 26u,
    52u, 50u, 40u, 48u, 61u, 15u, 7u, 21u,
    92u, 17u, 38u, 16u, 77u, 12u, 36u, 5u,
    56u, 75u, 13u, 14u, 66u, 74u, 51u, 2u,
    76u, 95u, 44u, 6u, 54u, 37u, 69u, 0u,
    47u, 42u, 4u, 82u, 62u, 93u, 49u, 89u,
    46u, 23u, 20u, 18u, 78u, 10u, 31u, 3u,
    53u, 58u, 30u, 70u, 94u, 83u, 39u, 33u,
    65u, 87u, 88u, 90u, 99u, 73u, 32u, 55u,
    64u, 9u, 41u, 28u,
};

static const uint32_t torch_loader_epoch_3[] = {
    99u, 23u, 69u, 0u, 68u, 44u, 57u, 97u,
    40u, 18u, 98u, 38u, 46u, 73u, 53u, 67u,
    33u, 17u, 9u, 41u, 51u, 86u, 92u, 76u,
    10u, 47u, 93u, 84u, 20u, 29u, 89u, 61u,
    16u, 35u, 71u, 48u, 77u, 95u, 74u, 39u,
    94u, 1u, 85u, 88u, 36u, 12u, 21u, 78u,
    45u, 3u, 55u, 14u, 80u, 26u, 13u, 43u,
    8u, 96u, 2u, 90u, 63u, 49u, 28u, 32u,
    37u, 66u, 87u, 54u, 64u, 62u, 56u, 30u,
    11u, 7u, 81u, 91u, 52u, 72u, 15u, 22u,
    82u, 79u, 70u, 31u, 60u, 75u, 83u, 27u,
    25u, 58u, 42u, 59u, 24u, 4u, 5u, 19u,
    34u, 50u, 6u, 65u,
};

static const uint32_t torch_loader_epoch_2_after_rand_3[] = {
    46u, 68u, 13u, 72u, 3u, 98u, 39u, 9u,
    18u, 99u, 48u, 50u, 93u, 52u, 77u, 55u,
    20u, 43u, 19u, 81u, 7u, 83u, 11u, 6u,
    49u, 22u, 32u, 10u, 89u, 33u, 66u, 64u,
    70u, 84u, 65u, 4u, 94u, 24u, 29u, 86u,
    53u, 78u, 73u, 28u, 31u, 63u, 54u, 42u,
    59u, 91u, 88u, 38u, 36u, 5u, 67u, 60u,
    0u, 47u, 40u, 12u, 74u, 96u, 17u, 2u,
    44u, 71u, 61u, 34u, 27u, 16u, 41u, 30u,
    62u, 1u, 85u, 14u, 26u, 45u, 97u, 92u,
    8u, 80u, 23u, 82u, 15u, 25u, 76u, 56u,
    87u, 79u, 69u, 51u, 90u, 35u, 75u, 57u,
    95u, 21u, 58u, 37u,
};

static const uint32_t torch_randperm_13_seed_11[] = {
    1u, 4u, 0u, 10u, 9u, 12u, 8u, 7u,
    3u, 5u, 11u, 6u, 2u,
};

#define TORCH_RANDPERM_60000 UINT64_C(0x444d5873f6939e1d)

static const uint32_t torch_normal_1[] = {
    0x4006d1c0u,
};

static const uint32_t torch_normal_5[] = {
    0x4006d1c0u, 0x3f5983c3u, 0x3f2d8e89u, 0xbf3a393fu, 0x3f17a53au,
};

static const uint32_t torch_normal_15[] = {
    0x4006d1c0u, 0x3f5983c3u, 0x3f2d8e89u, 0xbf3a393fu, 0x3f17a53au, 0xc00f231eu, 0x3f966614u, 0x40216c3fu,
    0xc017b3f5u, 0x401d1c7cu, 0x3fc5a511u, 0x403e740eu, 0xbf9d58c2u, 0x3f8c88b3u, 0x3fab51eau,
};

static const uint32_t torch_normal_16[] = {
    0x3eb18428u, 0x3f9c2132u, 0xbf883241u, 0x3f249f48u, 0x3fea32eau, 0xbd96a6f0u, 0x406f6e35u, 0xc02c60eeu,
    0x3ecb1425u, 0xbde546c8u, 0x3f7f3b9fu, 0x3d60c818u, 0x4014e22au, 0x3f689f66u, 0x3fd2f0a9u, 0x3faa94b0u,
};

static const uint32_t torch_normal_32[] = {
    0x3eb18428u, 0x3f9c2132u, 0xbf883241u, 0x3f249f48u, 0x3fea32eau, 0xbd96a6f0u, 0x406f6e35u, 0xc02c60eeu,
    0x3ecb1425u, 0xbde546c8u, 0x3f7f3b9fu, 0x3d60c818u, 0x4014e22au, 0x3f689f66u, 0x3fd2f0a9u, 0x3faa94b0u,
    0x3f82f1beu, 0x40172f16u, 0xbf076790u, 0xc03369c6u, 0x4025e413u, 0x3fc5ae0cu, 0x3e2a5ff6u, 0x3f1b2732u,
    0x3fd052c6u, 0x40a06b6fu, 0x4087a1f5u, 0xbff1fae0u, 0x401fbbecu, 0x3fb58cdau, 0x40abedeeu, 0x3e53563cu,
};

static const uint32_t torch_normal_35[] = {
    0x3eb18428u, 0x3f9c2132u, 0xbf883241u, 0x3f249f48u, 0x3fea32eau, 0xbd96a6f0u, 0x406f6e35u, 0xc02c60eeu,
    0x3ecb1425u, 0xbde546c8u, 0x3f7f3b9fu, 0x3d60c818u, 0x4014e22au, 0x3f689f66u, 0x3fd2f0a9u, 0x3faa94b0u,
    0x3f82f1beu, 0x40172f16u, 0xbf076790u, 0x3f994771u, 0x3f12fa6eu, 0x3ebab0a1u, 0x3fadd51cu, 0xbf9e3d10u,
    0xbff24200u, 0x40239564u, 0x3f24cee9u, 0x3fee70f5u, 0xbfb5532du, 0x3f20baa8u, 0x3fe8ae95u, 0x4008e40au,
    0x3fcfc49eu, 0x3b72e600u, 0xbfd47852u,
};

static const uint32_t torch_normal_3_then_4[] = {
    0x3f4da380u, 0x3e330786u, 0x3db63a26u, 0xbf1d1ca0u, 0x3d3d29cfu, 0xbfaf231eu, 0x3eaccc28u,
};


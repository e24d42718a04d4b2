/* Kafka's murmur2 hash, for the C files of this package. */

#ifndef ONCELOG_MURMUR2_H
#define ONCELOG_MURMUR2_H

#include <Python.h>
#include <stdint.h>

static inline uint32_t
murmur2_of(const unsigned char *data, Py_ssize_t left)
{
    const uint32_t m = 0x5BD1E995;
    uint32_t h = 0x9747B28Cu ^ (uint32_t)left;
    for (; left >= 4; data += 4, left -= 4) {
        uint32_t k = data[0] | (uint32_t)data[1] << 8 | (uint32_t)data[2] << 16 | (uint32_t)data[3] << 24;
        k *= m;
        k ^= k >> 24;
        h = h * m ^ k * m;
    }
    if (left) {
        for (Py_ssize_t i = 0; i < left; i++)
            h ^= (uint32_t)data[i] << (8 * i);
        h *= m;
    }
    h ^= h >> 13;
    h *= m;
    return h ^ (h >> 15);
}

#endif

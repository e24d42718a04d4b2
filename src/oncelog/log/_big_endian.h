/* Numbers of the log's files, which are big-endian and not aligned. */

#ifndef ONCELOG_BIG_ENDIAN_H
#define ONCELOG_BIG_ENDIAN_H

#include <stdint.h>

static inline uint32_t
u32_at(const unsigned char *data)
{
    return (uint32_t)data[0] << 24 | (uint32_t)data[1] << 16 | (uint32_t)data[2] << 8 | data[3];
}

static inline int32_t
i32_at(const unsigned char *data)
{
    return (int32_t)u32_at(data);
}

static inline int64_t
i64_at(const unsigned char *data)
{
    return (int64_t)((uint64_t)u32_at(data) << 32 | u32_at(data + 4));
}

#endif

/* Reads fetched batches: their headers, and their records as rows and as the buffers of Arrow columns.

   The Python functions are the oracle: those of fetched_records.py, columns.py and fetch_messages.py. A function
   here stops at, or returns None for, every input that it does not handle: malformed batches and records, wrong
   checksums, numbers above 64 bits. The caller then runs the Python code, which decides and raises. So no error
   text stands here twice, and what this file accepts must give the same result.

   Nothing is read outside the buffers, and no memory is allocated by a number in the data: lists grow with what
   was found, and the buffers of columns are allocated after all records were read once.

   Guard: tests/wire/test_wire_fetched_records.py. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#define MAX_VARINT_BYTES 10
#define MAX_TIMESTAMP_MS (INT64_MAX / 1000)
/* `fill` runs without the GIL if keys and values have at least this many bytes. */
#define UNLOCKED_BYTES (1 << 16)

typedef struct {
    const uint8_t *key, *value, *headers, *end; /* key and value are NULL for null */
    Py_ssize_t key_size, value_size;
    int64_t timestamp_delta, offset_delta;
    int has_headers;
} Record;

/* Read a signed varint and return the position after it, or NULL if it is longer than the bytes that are left,
   or than a 64-bit number. */
static inline const uint8_t *
read_varint(const uint8_t *at, const uint8_t *stop, int64_t *number)
{
    if (at < stop && *at < 128) {
        *number = (int64_t)(*at >> 1) ^ -(int64_t)(*at & 1);
        return at + 1;
    }
    uint64_t raw = 0;
    for (int shift = 0; at < stop && shift < 7 * MAX_VARINT_BYTES; shift += 7) {
        uint8_t byte = *at++;
        if (shift == 63 && byte > 1)
            return NULL;
        raw |= (uint64_t)(byte & 127) << shift;
        if (byte < 128) {
            *number = (int64_t)(raw >> 1) ^ -(int64_t)(raw & 1);
            return at;
        }
    }
    return NULL;
}

/* Read a field of bytes and return the position after it, or NULL. *bytes is NULL if the length is -1. */
static inline const uint8_t *
read_bytes(const uint8_t *at, const uint8_t *stop, const uint8_t **bytes, Py_ssize_t *size_bytes)
{
    int64_t size;
    at = read_varint(at, stop, &size);
    if (at == NULL || size < -1 || size > stop - at)
        return NULL;
    if (size < 0) {
        *bytes = NULL;
        *size_bytes = 0;
        return at;
    }
    *bytes = at;
    *size_bytes = (Py_ssize_t)size;
    return at + size;
}

/* Read a record and return the position after it, or NULL. The headers are not read. Without headers, the
   other fields fill the record exactly. */
static inline const uint8_t *
read_record(const uint8_t *at, const uint8_t *stop, Record *record)
{
    int64_t size, headers_count;
    at = read_varint(at, stop, &size);
    if (at == NULL || size < 1 || size > stop - at)
        return NULL;
    const uint8_t *end = at + size;
    if ((at = read_varint(at + 1, end, &record->timestamp_delta)) == NULL
        || (at = read_varint(at, end, &record->offset_delta)) == NULL
        || (at = read_bytes(at, end, &record->key, &record->key_size)) == NULL
        || (at = read_bytes(at, end, &record->value, &record->value_size)) == NULL)
        return NULL;
    record->headers = at;
    record->end = end;
    at = read_varint(at, end, &headers_count);
    if (at == NULL || headers_count < 0)
        return NULL;
    record->has_headers = headers_count > 0;
    return record->has_headers == (at < end) ? end : NULL;
}

/* Batches: see wire/header.py */

#define HEADER_BYTES 61
#define LOG_OVERHEAD_BYTES 12
#define CRC_START 21
#define CODEC_MASK 0x07
#define LOG_APPEND_TIME_BIT 0x08
#define CONTROL_BIT 0x20
#define MIN_RECORD_BYTES 7
#define MAX_RECORDS (1 << 22) /* of a batch, for columns */

typedef struct {
    int64_t base_offset, last_offset, base_timestamp_ms, max_timestamp_ms, producer_id;
    Py_ssize_t size_bytes;
    int32_t batch_length, leader_epoch, last_offset_delta, base_sequence, records_count;
    uint32_t crc;
    int16_t attributes, producer_epoch;
} Batch;

static inline uint64_t
big_endian(const uint8_t *at, int size_bytes)
{
    uint64_t number = 0;
    for (int index = 0; index < size_bytes; index++)
        number = number << 8 | at[index];
    return number;
}

/* Read the header of a whole batch of magic 2. Return -1 if there is none at this position. */
static int
read_batch(const Py_buffer *data, Py_ssize_t position, Batch *batch)
{
    if (position < 0 || position > data->len || data->len - position < HEADER_BYTES)
        return -1;
    const uint8_t *at = (const uint8_t *)data->buf + position;
    batch->base_offset = (int64_t)big_endian(at, 8);
    batch->batch_length = (int32_t)big_endian(at + 8, 4);
    batch->leader_epoch = (int32_t)big_endian(at + 12, 4);
    batch->crc = (uint32_t)big_endian(at + 17, 4);
    batch->attributes = (int16_t)big_endian(at + 21, 2);
    batch->last_offset_delta = (int32_t)big_endian(at + 23, 4);
    batch->base_timestamp_ms = (int64_t)big_endian(at + 27, 8);
    batch->max_timestamp_ms = (int64_t)big_endian(at + 35, 8);
    batch->producer_id = (int64_t)big_endian(at + 43, 8);
    batch->producer_epoch = (int16_t)big_endian(at + 51, 2);
    batch->base_sequence = (int32_t)big_endian(at + 53, 4);
    batch->records_count = (int32_t)big_endian(at + 57, 4);
    batch->size_bytes = (Py_ssize_t)batch->batch_length + LOG_OVERHEAD_BYTES;
    if (at[16] != 2 || batch->size_bytes < HEADER_BYTES || batch->size_bytes > data->len - position
        || batch->last_offset_delta < 0
        || __builtin_add_overflow(batch->base_offset, batch->last_offset_delta, &batch->last_offset))
        return -1;
    return 0;
}

/* Read the header of the batch at the position in a (position, header, ...) tuple. Return -1 without an
   exception if no whole batch is there, or with one if the tuple is malformed. */
static int
read_listed_batch(const Py_buffer *data, PyObject *entry, Py_ssize_t *position, Batch *batch)
{
    if (!PyTuple_Check(entry) || PyTuple_GET_SIZE(entry) < 2) {
        PyErr_SetString(PyExc_TypeError, "each batch must be a tuple of a position and a header");
        return -1;
    }
    *position = PyLong_AsSsize_t(PyTuple_GET_ITEM(entry, 0));
    if (*position == -1 && PyErr_Occurred())
        return -1;
    return read_batch(data, *position, batch);
}

/* Return 1 if the checksum is right or `crc32c` is None, 0 if it is wrong, -1 with an exception. */
static int
verify_crc(PyObject *crc32c, const Py_buffer *data, Py_ssize_t position, const Batch *batch)
{
    if (crc32c == Py_None)
        return 1;
    char *begin = (char *)data->buf + position + CRC_START;
    PyObject *view = PyMemoryView_FromMemory(begin, batch->size_bytes - CRC_START, PyBUF_READ);
    PyObject *crc = view == NULL ? NULL : PyObject_CallOneArg(crc32c, view);
    Py_XDECREF(view);
    if (crc == NULL)
        return -1;
    unsigned long actual = PyLong_AsUnsignedLong(crc);
    Py_DECREF(crc);
    if (actual == (unsigned long)-1 && PyErr_Occurred())
        return -1;
    return actual == batch->crc;
}

/* Return a new tuple of the type, which takes over the references to the items. Return NULL if an item is NULL.

   The items are in no reference cycle with the tuple, so the garbage collector need not visit the tuple. The
   collector stops tracking such plain tuples by itself, but not instances of a NamedTuple. */
static PyObject *
new_tuple(PyTypeObject *type, int size, PyObject **items)
{
    PyObject *tuple = type->tp_alloc(type, size);
    if (tuple != NULL)
        PyObject_GC_UnTrack(tuple);
    int is_good = tuple != NULL;
    for (int index = 0; index < size; index++) {
        is_good &= items[index] != NULL;
        if (tuple != NULL)
            PyTuple_SET_ITEM(tuple, index, items[index]);
        else
            Py_XDECREF(items[index]);
    }
    if (!is_good)
        Py_CLEAR(tuple);
    return tuple;
}

static inline PyObject *
number_or_none(int64_t number)
{
    return number < 0 ? Py_NewRef(Py_None) : PyLong_FromLongLong(number);
}

static PyObject *
header_of(PyTypeObject *type, const Batch *batch)
{
    PyObject *fields[] = {
        PyLong_FromLongLong(batch->base_offset),
        PyLong_FromLong(batch->batch_length),
        PyLong_FromLong(batch->leader_epoch),
        PyLong_FromLong(2),
        PyLong_FromUnsignedLong(batch->crc),
        PyLong_FromLong(batch->attributes),
        PyLong_FromLong(batch->last_offset_delta),
        PyLong_FromLongLong(batch->base_timestamp_ms),
        PyLong_FromLongLong(batch->max_timestamp_ms),
        number_or_none(batch->producer_id),
        number_or_none(batch->producer_epoch),
        number_or_none(batch->base_sequence),
        PyLong_FromLong(batch->records_count),
    };
    return new_tuple(type, 13, fields);
}

static int
check_tuple_type(PyTypeObject *type)
{
    if (PyType_IsSubtype(type, &PyTuple_Type) && type->tp_itemsize == sizeof(PyObject *))
        return 0;
    PyErr_SetString(PyExc_TypeError, "a subclass of tuple is needed");
    return -1;
}

PyDoc_STRVAR(plain_batches_doc,
"plain_batches(data, position, batches, header_type, batch_type, verdict)\n--\n\n"
"Append (position, header, verdict) for each batch up to the first control batch, which is excluded.\n\n"
"Also stop at the end of the data, before a batch that is not accepted, and before one that ends at offset\n"
"2^63-1. Return the position at which reading\n"
"stopped.");

static PyObject *
plain_batches(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer data;
    Py_ssize_t position;
    PyObject *list, *verdict, *result = NULL;
    PyTypeObject *header_type, *batch_type;
    if (!PyArg_ParseTuple(args, "y*nO!O!O!O", &data, &position, &PyList_Type, &list, &PyType_Type, &header_type,
                          &PyType_Type, &batch_type, &verdict))
        return NULL;
    if (check_tuple_type(header_type) < 0 || check_tuple_type(batch_type) < 0)
        goto done;
    Batch batch;
    while (read_batch(&data, position, &batch) == 0 && !(batch.attributes & CONTROL_BIT)
           && batch.last_offset != INT64_MAX) {
        PyObject *items[] = {PyLong_FromSsize_t(position), header_of(header_type, &batch), Py_NewRef(verdict)};
        PyObject *entry = new_tuple(batch_type, 3, items);
        int status = entry == NULL ? -1 : PyList_Append(list, entry);
        Py_XDECREF(entry);
        if (status < 0)
            goto done;
        position += batch.size_bytes;
    }
    result = PyLong_FromSsize_t(position);
done:
    PyBuffer_Release(&data);
    return result;
}

/* Rows */

/* Return a new tuple of the headers. Return NULL with an exception, or without one for malformed headers. */
static PyObject *
headers_of(const Record *record, const char *name_errors)
{
    const uint8_t *at = record->headers, *end = record->end, *bytes;
    int64_t count;
    Py_ssize_t size;
    at = read_varint(at, end, &count);
    if (at == NULL || count > (end - at) / 2)
        return NULL;
    PyObject *headers = PyTuple_New((Py_ssize_t)count);
    if (headers == NULL)
        return NULL;
    for (Py_ssize_t index = 0; index < count; index++) {
        PyObject *name, *value;
        at = read_bytes(at, end, &bytes, &size);
        if (at == NULL || bytes == NULL)
            goto malformed;
        name = PyUnicode_DecodeUTF8((const char *)bytes, size, name_errors);
        if (name == NULL) {
            if (PyErr_ExceptionMatches(PyExc_UnicodeDecodeError))
                PyErr_Clear();
            goto malformed;
        }
        at = read_bytes(at, end, &bytes, &size);
        value = at == NULL ? NULL
                : bytes == NULL ? Py_NewRef(Py_None)
                                : PyBytes_FromStringAndSize((const char *)bytes, size);
        PyObject *header = value == NULL ? NULL : PyTuple_Pack(2, name, value);
        Py_DECREF(name);
        Py_XDECREF(value);
        if (header == NULL)
            goto malformed;
        PyTuple_SET_ITEM(headers, index, header);
    }
    if (at == end)
        return headers;
malformed:
    Py_DECREF(headers);
    return NULL;
}

/* The fields of a batch's header that give its records their offsets and timestamps. With LogAppendTime,
   `is_fixed` is set and all records have `fixed_timestamp_ms`. */
typedef struct {
    int64_t base_offset, base_timestamp_ms, fixed_timestamp_ms;
    int is_fixed;
} Times;

/* Read the next record of a batch with its offset and timestamp, and return the position after it, or NULL. */
static inline const uint8_t *
read_next(const Times *times, const uint8_t *at, const uint8_t *stop, Record *record, int64_t *offset,
          int64_t *timestamp_ms)
{
    at = read_record(at, stop, record);
    if (at == NULL || __builtin_add_overflow(times->base_offset, record->offset_delta, offset)
        || __builtin_add_overflow(times->base_timestamp_ms, record->timestamp_delta, timestamp_ms))
        return NULL;
    if (times->is_fixed)
        *timestamp_ms = times->fixed_timestamp_ms;
    return at;
}

static inline PyObject *
bytes_or_none(const uint8_t *bytes, Py_ssize_t size)
{
    return bytes == NULL ? Py_NewRef(Py_None) : PyBytes_FromStringAndSize((const char *)bytes, size);
}

typedef struct {
    PyTypeObject *type;
    PyObject *topic, *partition, *timestamp_type, *no_headers;
    PyObject *timestamp; /* the int object of the previous timestamp: often the next one is equal */
    int64_t timestamp_ms;
    const char *name_errors;
} RowMaker;

/* Append a row to the list. Return 0, or -1 with or without an exception. */
static int
append_row(RowMaker *maker, PyObject *rows, const Record *record, int64_t offset, int64_t timestamp_ms)
{
    if (maker->timestamp == NULL || maker->timestamp_ms != timestamp_ms) {
        Py_XSETREF(maker->timestamp, PyLong_FromLongLong(timestamp_ms));
        maker->timestamp_ms = timestamp_ms;
    }
    PyObject *items[] = {
        Py_NewRef(maker->topic),
        Py_NewRef(maker->partition),
        PyLong_FromLongLong(offset),
        Py_XNewRef(maker->timestamp),
        Py_NewRef(maker->timestamp_type),
        bytes_or_none(record->key, record->key_size),
        bytes_or_none(record->value, record->value_size),
        record->has_headers ? headers_of(record, maker->name_errors) : Py_NewRef(maker->no_headers),
    };
    PyObject *row = new_tuple(maker->type, 8, items);
    if (row == NULL)
        return -1;
    int result = PyList_Append(rows, row);
    Py_DECREF(row);
    return result;
}

/* Return a new reference to None, or NULL if an exception is set. */
static PyObject *
refuse(void)
{
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* Read `count` records, append their rows, and return the position after them; NULL with or without an
   exception. Records below `min_offset` are left out if the batch's base offset is below `min_offset`. If it is
   not, none is left out: a damaged batch may have records below its base offset, and fetched_records.py keeps
   them. `*value_bytes` grows by the sizes of the appended values. `*last_offset` is set to the offset of the
   last row. */
static const uint8_t *
append_rows(RowMaker *maker, PyObject *rows, const uint8_t *at, const uint8_t *stop, Py_ssize_t count,
            const Times *times, int64_t min_offset, int64_t *value_bytes, int64_t *last_offset)
{
    if (times->base_offset >= min_offset)
        min_offset = INT64_MIN;
    for (; count > 0; count--) {
        Record record;
        int64_t offset, timestamp_ms;
        at = read_next(times, at, stop, &record, &offset, &timestamp_ms);
        if (at == NULL)
            return NULL;
        if (offset >= min_offset) {
            if (append_row(maker, rows, &record, offset, timestamp_ms) < 0)
                return NULL;
            *value_bytes += record.value_size;
            *last_offset = offset;
        }
        else if (record.has_headers) {
            /* The headers of a record that is left out are checked as well. */
            PyObject *headers = headers_of(&record, maker->name_errors);
            if (headers == NULL)
                return NULL;
            Py_DECREF(headers);
        }
    }
    return at;
}

static int
start_maker(RowMaker *maker)
{
    if (check_tuple_type(maker->type) < 0)
        return -1;
    maker->no_headers = PyTuple_New(0);
    return maker->no_headers == NULL ? -1 : 0;
}

static void
end_maker(RowMaker *maker)
{
    Py_XDECREF(maker->no_headers);
    Py_XDECREF(maker->timestamp);
}

PyDoc_STRVAR(rows_doc,
"rows(payload, position, count, base_offset, base_timestamp_ms, fixed_timestamp_ms, min_offset,\n"
"     record_type, topic, partition, timestamp_type, name_errors)\n--\n\n"
"Read `count` records. Return a list of those from min_offset on, and the position after all of them.\n\n"
"Return None for bytes that are not accepted.");

static PyObject *
rows(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer data;
    Py_ssize_t position, count;
    long long base_offset, base_timestamp_ms, fixed_timestamp_ms = 0, min_offset;
    int64_t value_bytes = 0, last_offset;
    PyObject *fixed_timestamp, *list = NULL, *result = NULL;
    RowMaker maker = {0};
    if (!PyArg_ParseTuple(args, "y*nnLLOLO!OOOs", &data, &position, &count, &base_offset, &base_timestamp_ms,
                          &fixed_timestamp, &min_offset, &PyType_Type, &maker.type, &maker.topic,
                          &maker.partition, &maker.timestamp_type, &maker.name_errors))
        return NULL;
    if (fixed_timestamp != Py_None) {
        fixed_timestamp_ms = PyLong_AsLongLong(fixed_timestamp);
        if (fixed_timestamp_ms == -1 && PyErr_Occurred())
            goto done;
    }
    if (start_maker(&maker) < 0 || (list = PyList_New(0)) == NULL)
        goto done;
    const uint8_t *begin = data.buf, *at = NULL;
    Times times = {base_offset, base_timestamp_ms, fixed_timestamp_ms, fixed_timestamp != Py_None};
    if (position >= 0 && position <= data.len)
        at = append_rows(&maker, list, begin + position, begin + data.len, count, &times, min_offset,
                         &value_bytes, &last_offset);
    result = at == NULL ? refuse() : Py_BuildValue("On", list, (Py_ssize_t)(at - begin));
done:
    Py_XDECREF(list);
    end_maker(&maker);
    PyBuffer_Release(&data);
    return result;
}

PyDoc_STRVAR(batch_rows_doc,
"batch_rows(data, batches, index, rows, max_records, min_offset, verdict, crc32c,\n"
"           record_type, topic, partition, timestamp_types, name_errors)\n--\n\n"
"Append the records of batches[index:] to `rows`. Return the index of the first unread batch, the offset to\n"
"continue from, and the total size of the values in bytes.\n\n"
"Each batch is (position in the data, header, verdict). Stop before a batch that has a verdict other than\n"
"`verdict`, is compressed, ends before min_offset, would make `rows` longer than max_records, or is not accepted.");

static PyObject *
batch_rows(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer data;
    Py_ssize_t index, max_records;
    long long min_offset;
    int64_t value_bytes = 0;
    PyObject *batches, *list, *verdict, *crc32c, *timestamp_types, *result = NULL;
    RowMaker maker = {0};
    if (!PyArg_ParseTuple(args, "y*O!nO!nLOOO!OOO!s", &data, &PyList_Type, &batches, &index, &PyList_Type, &list,
                          &max_records, &min_offset, &verdict, &crc32c, &PyType_Type, &maker.type, &maker.topic,
                          &maker.partition, &PyTuple_Type, &timestamp_types, &maker.name_errors))
        return NULL;
    if (index < 0 || PyTuple_GET_SIZE(timestamp_types) != 2) {
        PyErr_SetString(PyExc_ValueError, "an index and two timestamp types are needed");
        goto done;
    }
    if (start_maker(&maker) < 0)
        goto done;
    for (; index < PyList_GET_SIZE(batches); index++) {
        PyObject *entry = PyList_GET_ITEM(batches, index);
        Py_ssize_t position, rows_count = PyList_GET_SIZE(list);
        Batch batch;
        if (read_listed_batch(&data, entry, &position, &batch) < 0 || PyTuple_GET_SIZE(entry) < 3
            || PyTuple_GET_ITEM(entry, 2) != verdict || batch.attributes & (CODEC_MASK | CONTROL_BIT)
            || batch.last_offset < min_offset || batch.records_count < 0
            || batch.records_count > max_records - rows_count
            || verify_crc(crc32c, &data, position, &batch) != 1)
            break;
        int is_fixed = (batch.attributes & LOG_APPEND_TIME_BIT) != 0;
        Times times = {batch.base_offset, batch.base_timestamp_ms, batch.max_timestamp_ms, is_fixed};
        maker.timestamp_type = PyTuple_GET_ITEM(timestamp_types, is_fixed);
        const uint8_t *begin = (const uint8_t *)data.buf + position, *stop = begin + batch.size_bytes;
        int64_t batch_value_bytes = 0, last_offset = batch.last_offset;
        if (append_rows(&maker, list, begin + HEADER_BYTES, stop, batch.records_count, &times, min_offset,
                        &batch_value_bytes, &last_offset)
                != stop
            || last_offset == INT64_MAX || batch.last_offset == INT64_MAX) {
            if (PyList_SetSlice(list, rows_count, PyList_GET_SIZE(list), NULL) < 0)
                goto done;
            break;
        }
        value_bytes += batch_value_bytes;
        /* The last row of a damaged batch may be beyond the batch's last offset. */
        min_offset = (last_offset > batch.last_offset ? last_offset : batch.last_offset) + 1;
    }
    if (!PyErr_Occurred())
        result = Py_BuildValue("nLL", index, min_offset, (long long)value_bytes);
done:
    end_maker(&maker);
    PyBuffer_Release(&data);
    return result;
}

/* Columns */

/* The records of one batch, decompressed. */
typedef struct {
    const uint8_t *begin, *stop;
    Py_ssize_t count, number; /* `number`: the batch's index in the caller's list */
    Times times;
    Py_buffer view; /* holds a payload outside the fetched data; otherwise view.obj is NULL */
} Payload;

/* A column of bytes: the buffers of an Arrow BinaryArray. `validity` has a bit for each row; it is NULL if no
   row is null. */
typedef struct {
    PyObject *bounds_object, *bytes_object, *validity_object;
    int32_t *bounds;
    uint8_t *bytes, *validity;
    Py_ssize_t nulls_count, size_bytes, used_bytes;
} BytesColumn;

typedef struct {
    Payload *payloads;
    Py_ssize_t payloads_count;
    int64_t first_offset, last_offset;
    /* Found by `measure` */
    Py_ssize_t rows_count, late_count, headers_count;
    BytesColumn key, value;
    /* Filled by `fill` */
    PyObject *offset_object, *timestamp_object, *timestamp_validity_object, *type_object, *headers_object;
    int64_t *offset, *timestamp;
    int32_t *type;
    uint8_t *timestamp_validity;
    int64_t *headers; /* of each record with headers: row, batch index, start and end of the headers */
} Columns;

static inline void
clear_bit(uint8_t *bits, Py_ssize_t index)
{
    if (bits != NULL)
        bits[index >> 3] &= (uint8_t)~(1u << (index & 7));
}

static inline int
is_late(int64_t timestamp_ms)
{
    return timestamp_ms > MAX_TIMESTAMP_MS || timestamp_ms < -MAX_TIMESTAMP_MS;
}

/* Check all records, and count the rows and their bytes. Return -1 if a record is not accepted. */
static int
measure(Columns *columns)
{
    for (Py_ssize_t index = 0; index < columns->payloads_count; index++) {
        const Payload *payload = columns->payloads + index;
        const uint8_t *at = payload->begin;
        for (Py_ssize_t left = payload->count; left > 0; left--) {
            Record record;
            int64_t offset, timestamp_ms;
            at = read_next(&payload->times, at, payload->stop, &record, &offset, &timestamp_ms);
            if (at == NULL)
                return -1;
            if (offset < columns->first_offset || offset > columns->last_offset)
                continue;
            columns->rows_count++;
            columns->late_count += is_late(timestamp_ms);
            columns->headers_count += record.has_headers;
            columns->key.nulls_count += record.key == NULL;
            columns->key.size_bytes += record.key_size;
            columns->value.nulls_count += record.value == NULL;
            columns->value.size_bytes += record.value_size;
        }
        if (at != payload->stop)
            return -1;
    }
    return columns->key.size_bytes > INT32_MAX || columns->value.size_bytes > INT32_MAX ? -1 : 0;
}

/* Return the memory of a new bytes object, or NULL with an exception. */
static void *
new_buffer(Py_ssize_t size_bytes, PyObject **object)
{
    *object = PyBytes_FromStringAndSize(NULL, size_bytes);
    return *object == NULL ? NULL : PyBytes_AS_STRING(*object);
}

/* Return a validity bitmap with all bits set, or NULL with an exception. */
static uint8_t *
new_validity(Py_ssize_t rows_count, PyObject **object)
{
    uint8_t *bits = new_buffer((rows_count + 7) / 8, object);
    if (bits != NULL)
        memset(bits, 0xff, (size_t)(rows_count + 7) / 8);
    return bits;
}

static int
allocate_bytes_column(BytesColumn *column, Py_ssize_t rows_count)
{
    column->bounds = new_buffer((rows_count + 1) * (Py_ssize_t)sizeof(int32_t), &column->bounds_object);
    column->bytes = new_buffer(column->size_bytes, &column->bytes_object);
    if (column->bounds == NULL || column->bytes == NULL)
        return -1;
    column->bounds[0] = 0;
    if (column->nulls_count)
        column->validity = new_validity(rows_count, &column->validity_object);
    return column->nulls_count && column->validity == NULL ? -1 : 0;
}

static int
allocate(Columns *columns)
{
    Py_ssize_t count = columns->rows_count;
    columns->offset = new_buffer(count * 8, &columns->offset_object);
    columns->timestamp = new_buffer(count * 8, &columns->timestamp_object);
    columns->type = new_buffer(count * 4, &columns->type_object);
    columns->headers = new_buffer(columns->headers_count * 32, &columns->headers_object);
    if (columns->offset == NULL || columns->timestamp == NULL || columns->type == NULL
        || columns->headers == NULL)
        return -1;
    if (columns->late_count) {
        columns->timestamp_validity = new_validity(count, &columns->timestamp_validity_object);
        if (columns->timestamp_validity == NULL)
            return -1;
    }
    return allocate_bytes_column(&columns->key, count) < 0 || allocate_bytes_column(&columns->value, count) < 0
               ? -1
               : 0;
}

static inline int
copy_bytes(BytesColumn *column, Py_ssize_t row, const uint8_t *bytes, Py_ssize_t size)
{
    if (bytes == NULL) {
        if (column->validity == NULL)
            return -1;
        clear_bit(column->validity, row);
    }
    else {
        if (size > column->size_bytes - column->used_bytes)
            return -1;
        memcpy(column->bytes + column->used_bytes, bytes, (size_t)size);
        column->used_bytes += size;
    }
    column->bounds[row + 1] = (int32_t)column->used_bytes;
    return 0;
}

/* Fill the buffers. Another thread may have changed the data since `measure`, so each size is checked again.
   Return -1 if the rows differ from those that were measured. */
static int
fill(Columns *columns)
{
    Py_ssize_t row = 0, headers_count = 0;
    for (Py_ssize_t index = 0; index < columns->payloads_count; index++) {
        const Payload *payload = columns->payloads + index;
        const uint8_t *at = payload->begin;
        for (Py_ssize_t left = payload->count; left > 0; left--) {
            Record record;
            int64_t offset, timestamp_ms;
            at = read_next(&payload->times, at, payload->stop, &record, &offset, &timestamp_ms);
            if (at == NULL)
                return -1;
            if (offset < columns->first_offset || offset > columns->last_offset)
                continue;
            int late = is_late(timestamp_ms);
            if (row == columns->rows_count || (late && columns->timestamp_validity == NULL)
                || (record.has_headers && headers_count == columns->headers_count)
                || copy_bytes(&columns->key, row, record.key, record.key_size) < 0
                || copy_bytes(&columns->value, row, record.value, record.value_size) < 0)
                return -1;
            columns->offset[row] = offset;
            columns->timestamp[row] = late ? 0 : timestamp_ms * 1000;
            if (late)
                clear_bit(columns->timestamp_validity, row);
            columns->type[row] = payload->times.is_fixed;
            if (record.has_headers) {
                int64_t *entry = columns->headers + 4 * headers_count++;
                entry[0] = row;
                entry[1] = payload->number;
                entry[2] = record.headers - payload->begin;
                entry[3] = record.end - payload->begin;
            }
            row++;
        }
    }
    return row == columns->rows_count && headers_count == columns->headers_count ? 0 : -1;
}

static void
release_payloads(Columns *columns)
{
    for (Py_ssize_t index = 0; index < columns->payloads_count; index++)
        PyBuffer_Release(&columns->payloads[index].view);
    PyMem_Free(columns->payloads);
}

/* Add the records of a batch, unless it has none in the range. Return -1 if the batch is not accepted, or with
   an exception. */
static int
add_payload(Columns *columns, const Py_buffer *data, PyObject *batches, PyObject *payloads, Py_ssize_t number,
            PyObject *crc32c)
{
    Payload *payload = columns->payloads + columns->payloads_count;
    Py_ssize_t position;
    Batch batch;
    if (read_listed_batch(data, PyList_GET_ITEM(batches, number), &position, &batch) < 0)
        return -1;
    if (batch.attributes & CONTROL_BIT || batch.records_count == 0
        || batch.last_offset < columns->first_offset || batch.base_offset > columns->last_offset)
        return 0;
    memset(payload, 0, sizeof(*payload));
    if (payloads != Py_None) {
        if (PyObject_GetBuffer(PyList_GET_ITEM(payloads, number), &payload->view, PyBUF_SIMPLE) < 0)
            return -1;
        payload->begin = payload->view.buf;
        payload->stop = payload->begin + payload->view.len;
    }
    else {
        if (batch.attributes & CODEC_MASK || verify_crc(crc32c, data, position, &batch) != 1)
            return -1;
        payload->begin = (const uint8_t *)data->buf + position + HEADER_BYTES;
        payload->stop = payload->begin + batch.size_bytes - HEADER_BYTES;
    }
    columns->payloads_count++;
    payload->count = batch.records_count;
    payload->number = number;
    payload->times.base_offset = batch.base_offset;
    payload->times.base_timestamp_ms = batch.base_timestamp_ms;
    payload->times.fixed_timestamp_ms = batch.max_timestamp_ms;
    payload->times.is_fixed = (batch.attributes & LOG_APPEND_TIME_BIT) != 0;
    return batch.records_count < 0 || batch.records_count > MAX_RECORDS
                   || payload->count > (payload->stop - payload->begin) / MIN_RECORD_BYTES
               ? -1
               : 0;
}

/* Add all batches. Return -1 if one is not accepted, or with an exception. */
static int
add_payloads(Columns *columns, const Py_buffer *data, PyObject *batches, PyObject *payloads, PyObject *crc32c)
{
    Py_ssize_t count = PyList_GET_SIZE(batches);
    if (payloads != Py_None && (!PyList_Check(payloads) || PyList_GET_SIZE(payloads) != count)) {
        PyErr_SetString(PyExc_TypeError, "a payload for each batch is needed");
        return -1;
    }
    columns->payloads = PyMem_New(Payload, count ? count : 1);
    if (columns->payloads == NULL) {
        PyErr_NoMemory();
        return -1;
    }
    for (Py_ssize_t number = 0; number < count; number++) {
        /* `crc32c` and the payloads may run Python code, which could have changed the lists. */
        if (number >= PyList_GET_SIZE(batches)
            || (payloads != Py_None && number >= PyList_GET_SIZE(payloads))
            || add_payload(columns, data, batches, payloads, number, crc32c) < 0)
            return -1;
    }
    return 0;
}

static PyObject *
buffers_of(BytesColumn *column)
{
    PyObject *validity = column->validity_object == NULL ? Py_None : column->validity_object;
    return Py_BuildValue("nOOO", column->nulls_count, validity, column->bounds_object, column->bytes_object);
}

static PyObject *
result_of(Columns *columns)
{
    PyObject *key = buffers_of(&columns->key), *value = buffers_of(&columns->value), *result = NULL;
    PyObject *validity =
        columns->timestamp_validity_object == NULL ? Py_None : columns->timestamp_validity_object;
    if (key != NULL && value != NULL)
        result = Py_BuildValue("nOOOnOOOO", columns->rows_count, key, value, columns->offset_object,
                               columns->late_count, validity, columns->timestamp_object, columns->type_object,
                               columns->headers_object);
    Py_XDECREF(key);
    Py_XDECREF(value);
    return result;
}

static void
release_buffers(Columns *columns)
{
    BytesColumn *both[] = {&columns->key, &columns->value};
    for (int index = 0; index < 2; index++) {
        Py_XDECREF(both[index]->bounds_object);
        Py_XDECREF(both[index]->bytes_object);
        Py_XDECREF(both[index]->validity_object);
    }
    Py_XDECREF(columns->offset_object);
    Py_XDECREF(columns->timestamp_object);
    Py_XDECREF(columns->timestamp_validity_object);
    Py_XDECREF(columns->type_object);
    Py_XDECREF(columns->headers_object);
}

PyDoc_STRVAR(columns_doc,
"columns(data, batches, payloads, first_offset, last_offset, crc32c)\n--\n\n"
"Return the records from first_offset to last_offset as the buffers of Arrow columns.\n\n"
"Each batch is (position in the data, header). `payloads` has their records, verified and decompressed. If it\n"
"is None, the records are read from `data`, and no batch may be compressed. Return None for bytes that are not\n"
"accepted. Record headers are not parsed, but their positions are returned.");

static PyObject *
columns_function(PyObject *Py_UNUSED(module), PyObject *args)
{
    Py_buffer data;
    PyObject *batches, *payloads, *crc32c, *result = NULL;
    long long first_offset, last_offset;
    if (!PyArg_ParseTuple(args, "y*O!OLLO", &data, &PyList_Type, &batches, &payloads, &first_offset,
                          &last_offset, &crc32c))
        return NULL;
    Columns columns = {.first_offset = first_offset, .last_offset = last_offset};
    int status = add_payloads(&columns, &data, batches, payloads, crc32c);
    if (status == 0)
        status = measure(&columns);
    if (status < 0) {
        result = refuse();
        goto done;
    }
    if (allocate(&columns) < 0)
        goto done;
    if (columns.key.size_bytes + columns.value.size_bytes < UNLOCKED_BYTES)
        status = fill(&columns);
    else {
        Py_BEGIN_ALLOW_THREADS
        status = fill(&columns);
        Py_END_ALLOW_THREADS
    }
    result = status < 0 ? refuse() : result_of(&columns);
done:
    release_buffers(&columns);
    release_payloads(&columns);
    PyBuffer_Release(&data);
    return result;
}

static PyMethodDef methods[] = {
    {"plain_batches", plain_batches, METH_VARARGS, plain_batches_doc},
    {"batch_rows", batch_rows, METH_VARARGS, batch_rows_doc},
    {"rows", rows, METH_VARARGS, rows_doc},
    {"columns", columns_function, METH_VARARGS, columns_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "oncelog.wire._fetched_records", "Reads fetched batches.", 0, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC
PyInit__fetched_records(void)
{
    return PyModuleDef_Init(&definition);
}

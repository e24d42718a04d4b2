/* The hash of oncelog/client/producer/partitioner.py, which is the oracle.

   Guard: tests/client/test_client_partitioner.py. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

PyDoc_STRVAR(murmur2_doc, "murmur2(data)\n--\n\nReturn Kafka's murmur2 hash as an unsigned 32-bit number.");

static PyObject *
murmur2(PyObject *module, PyObject *key)
{
    Py_buffer view;
    if (PyObject_GetBuffer(key, &view, PyBUF_SIMPLE) < 0)
        return NULL;
    const uint32_t m = 0x5BD1E995;
    const unsigned char *data = view.buf;
    Py_ssize_t left = view.len;
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
    PyBuffer_Release(&view);
    h ^= h >> 13;
    h *= m;
    return PyLong_FromUnsignedLong(h ^ (h >> 15));
}

static PyMethodDef methods[] = {
    {"murmur2", murmur2, METH_O, murmur2_doc},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "oncelog.client.producer._partitioner", "The hash of the default partitioner.", 0,
    methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC
PyInit__partitioner(void)
{
    return PyModuleDef_Init(&definition);
}
